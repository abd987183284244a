// What the scripts for Node share; see checks.py.

export const [url, MODEL] = process.argv.slice(2);
export const key = process.env.JITNEY_API_KEY ?? "none";
export const base = `${url}/v1`;
//: A prompt that has the obedient model call the tool `add`, and say what it gave.
export const TASK = 'Do this:\nCALL add {"a": 4000, "b": 711}\nSAY the sum is RESULT';

export function expect(condition, complaint) {
  if (!condition) {
    throw new Error(typeof complaint === "string" ? complaint : JSON.stringify(complaint));
  }
}

/** Makes the checks, by name, prints a line for each, and ends with status 1 if one failed. */
export async function run(checks) {
  let failed = 0;
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      console.log(`${name}: ok`);
    } catch (error) {
      failed += 1;
      console.error(error);
      console.log(`${name}: FAILED (${String(error).replace(/\s+/g, " ").slice(0, 300)})`);
    }
  }
  process.exit(failed ? 1 : 0);
}

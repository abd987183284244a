// Sends the key once, as JSON; the session comes back as a cookie that this script cannot read.
const form = document.getElementById("form");
const refused = document.getElementById("refused");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = document.getElementById("key").value;
  const answer = await fetch("sign-in", {
    method: "POST",
    headers: {"content-type": "application/json"},
    body: JSON.stringify({key}),
  }).catch(() => null);
  if (answer?.ok) {
    return location.reload();
  }
  refused.textContent = answer
    ? (await answer.json()).error.message
    : "The server does not answer.";
  refused.hidden = false;
});

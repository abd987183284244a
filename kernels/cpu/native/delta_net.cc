// A gated delta net over the rows of a step: convolution, memory and gated norm in one call. And the
// memory alone (`recur`), for layers that convolve and norm in other ways.
//
// Rows of a sequence pass one after the other, and each sum has one order, so that a row's numbers
// do not depend on how its prompt was cut, nor on who else is in the step. A task is a sequence and
// a key head with the value heads that share it: no other task touches their channels or memory. A
// block of a memory's columns stays in the nearest cache while a block of rows passes through it.
#include <cmath>

#include "parts.h"
#include "tasks.h"

namespace jitney {
namespace {
namespace delta {

namespace ffi = xla::ffi;

// Rows that pass through a block of columns together.
constexpr std::int64_t kRowsOfBlock = 32;
// Vectors of a block of columns: their sums stay in registers.
constexpr int kColumns = kLanes == 8 ? 2 : 4;
constexpr float kNormEps = 1e-6f;

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline float softplus(float x) {
  return x > 0.0f ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

// Numbers of one head for a block of rows, [rows, dim] or [rows, width] each, and of each row what
// is left of the memory and how much of the value is written.
struct Block {
  const float *queries, *keys, *values;
  float* read;
  const float *decay, *beta;  // beta null: values are added as they are
  std::int64_t rows, dim, width;
  std::int64_t key_step, value_step;  // from a row's numbers to the next row's
};

// The rows of a block through kCount vectors of columns of a memory [dim, width], from `column` on.
template <int kCount, bool kCorrects = true>
void pass(const Block& of, float* memory, std::int64_t column) {
  float* const first = memory + column;
  for (std::int64_t row = 0; row < of.rows; ++row) {
    const float *key = of.keys + row * of.key_step, *query = of.queries + row * of.key_step;
    const float* value = of.values + row * of.value_step + column;
    const Floats decay = splat(of.decay[row]);
    Floats even[kCount] = {}, odd[kCount] = {}, change[kCount];
    if constexpr (kCorrects) {
      for (std::int64_t d = 0; d < of.dim; d += 2) {
        const float* cells = first + d * of.width;
        const Floats one = splat(key[d]), other = splat(key[d + 1]);
        repeat<kCount>([&](auto i) {
          even[i] = multiply_add(one, load(cells + i * kLanes), even[i]);
          odd[i] = multiply_add(other, load(cells + of.width + i * kLanes), odd[i]);
        });
      }
      const Floats beta = splat(of.beta[row]);
      repeat<kCount>([&](auto i) {
        const Floats known = (even[i] + odd[i]) * decay;
        change[i] = (load(value + i * kLanes) - known) * beta;
        even[i] = odd[i] = Floats{};
      });
    } else {
      repeat<kCount>([&](auto i) { change[i] = load(value + i * kLanes); });
    }
    for (std::int64_t d = 0; d < of.dim; d += 2) {
      float* cells = first + d * of.width;
      const Floats one = splat(key[d]), other = splat(key[d + 1]);
      const Floats reads = splat(query[d]), reads_other = splat(query[d + 1]);
      repeat<kCount>([&](auto i) {
        float* cell = cells + i * kLanes;
        const Floats upper = multiply_add(one, change[i], load(cell) * decay);
        const Floats lower = multiply_add(other, change[i], load(cell + of.width) * decay);
        store(upper, cell);
        store(lower, cell + of.width);
        even[i] = multiply_add(reads, upper, even[i]);
        odd[i] = multiply_add(reads_other, lower, odd[i]);
      });
    }
    repeat<kCount>([&](auto i) {
      store(even[i] + odd[i], of.read + row * of.value_step + column + i * kLanes);
    });
  }
}

// The memory that a piece of rows goes on in: what is in the slot that it reads, or nothing where a
// sequence begins.
inline void carry(float* own, const float* before, std::int64_t size, bool begins) {
  if (begins) {
    std::memset(own, 0, size * sizeof(float));
  } else if (own != before) {
    std::memcpy(own, before, size * sizeof(float));
  }
}

template <class Number>
struct Step {
  const Number* x;        // [rows, channels + heads * width]: what is convolved, then gates
  const Number* weights;  // [taps, channels]
  const float *rates, *log_decay, *rate_bias, *norm;
  const std::int32_t *ends, *starts, *again;
  const std::int32_t *stops, *reads, *writes;  // [sequences, pieces]
  float* kept;    // [slots, taps, channels]
  float* memory;  // [slots, heads, dim, width]
  Number* out;    // [rows, heads * width]
  std::int64_t rows, sequences, pieces, slots, key_heads, heads, dim, width, channels, taps;
  float eps;

  std::int64_t row_size() const { return channels + heads * width; }

  // The inputs of `count` channels from `channel` on, so many tokens before the first row of a
  // sequence; null before its start.
  const float* before(std::int64_t sequence, std::int64_t back, std::int64_t channel) const {
    if (starts[sequence] < back) {
      return nullptr;
    }
    const std::int64_t at = taps - back - again[sequence];
    return kept + (reads[sequence * pieces] * taps + at) * channels + channel;
  }

  // silu of the convolution of some channels in a row of a sequence.
  void convolve(std::int64_t sequence, std::int64_t row, std::int64_t channel, std::int64_t count,
                float* to) const {
    const Number* own = x + (ends[sequence] + row) * row_size() + channel;
    const Number* weight = weights + (taps - 1) * channels + channel;
    for (std::int64_t i = 0; i < count; i += kLanes) {
      store(load(own + i) * load(weight + i), to + i);
    }
    for (std::int64_t lag = 1; lag < taps; ++lag) {
      weight -= channels;
      if (row >= lag) {
        add(own - lag * row_size(), weight, count, to);
      } else if (const float* from = before(sequence, lag - row, channel)) {
        add(from, weight, count, to);
      }
    }
    for (std::int64_t i = 0; i < count; i += kLanes) {
      store(silu<float>(load(to + i)), to + i);
    }
  }

  template <class From>
  static void add(const From* from, const Number* weight, std::int64_t count, float* to) {
    for (std::int64_t i = 0; i < count; i += kLanes) {
      store(multiply_add(load(from + i), load(weight + i), load(to + i)), to + i);
    }
  }

  // A query or a key brought to this length.
  void normalise(float* head, float length) const {
    Floats squares = {};
    for (std::int64_t i = 0; i < dim; i += kLanes) {
      squares = multiply_add(load(head + i), load(head + i), squares);
    }
    const Floats factor = splat(length / std::sqrt(total(squares) + kNormEps));
    for (std::int64_t i = 0; i < dim; i += kLanes) {
      store(load(head + i) * factor, head + i);
    }
  }

  // The last inputs of some channels before row `count` of a sequence, in a slot.
  void keep(std::int64_t sequence, std::int64_t slot, std::int64_t count, std::int64_t channel,
            std::int64_t size) const {
    float* to = kept + slot * taps * channels + channel;
    for (std::int64_t tap = 0; tap < taps; ++tap, to += channels) {
      const std::int64_t row = count - taps + tap;
      if (row >= 0) {
        copy_row(x + (ends[sequence] + row) * row_size() + channel, to, size);
      } else if (const float* from = before(sequence, -row, channel)) {
        std::memmove(to, from, size * sizeof(float));  // a later tap, or itself
      } else {
        std::memset(to, 0, size * sizeof(float));
      }
    }
  }

  // What a head read in a row, normed and gated.
  void close(const float* read, std::int64_t row, std::int64_t head) const {
    Floats squares = {};
    for (std::int64_t i = 0; i < width; i += kLanes) {
      squares = multiply_add(load(read + i), load(read + i), squares);
    }
    const float mean = total(squares) * (1.0f / static_cast<float>(width));
    const Floats factor = splat(1.0f / std::sqrt(mean + eps));
    const Number* gate = x + row * row_size() + channels + head * width;
    Number* to = out + (row * heads + head) * width;
    for (std::int64_t i = 0; i < width; i += kLanes) {
      const Floats normed = load(read + i) * factor * load(norm + i);
      store(normed * silu<Number>(load(gate + i)), to + i);
    }
  }

  // The memory that a piece of a sequence's rows passes through, of the value heads from `head` on,
  // in the slot that it writes: what was in the one that it reads.
  void open(std::int64_t sequence, std::int64_t piece, std::int64_t head, std::int64_t shared,
            std::int64_t begin) const {
    const std::int64_t at = sequence * pieces + piece, size = dim * width;
    carry(memory + (writes[at] * heads + head) * size, memory + (reads[at] * heads + head) * size,
          shared * size, begin == 0 && starts[sequence] == 0);
  }

  // A block of rows through the memory of a value head in a slot. values, read [rows, width]; more
  // [2, rows] is room.
  void run_head(Block block, std::int64_t sequence, std::int64_t slot, std::int64_t begin,
                std::int64_t head, float* values, float* more) const {
    float* own = memory + (slot * heads + head) * dim * width;
    float *decay = more, *beta = more + kRowsOfBlock;
    for (std::int64_t row = 0; row < block.rows; ++row) {
      const std::int64_t channel = channels - (heads - head) * width;
      convolve(sequence, begin + row, channel, width, values + row * width);
      const float* rate = rates + (ends[sequence] + begin + row) * 2 * heads;
      const float speed = std::exp(log_decay[head]);
      // A row that is in the memory already changes nothing, and reads what it read.
      decay[row] = std::exp(-speed * softplus(rate[heads + head] + rate_bias[head]));
      beta[row] = sigmoid(rate[head]);
      if (again[sequence] != 0) {
        decay[row] = 1.0f;
        beta[row] = 0.0f;
      }
    }
    block.values = values;
    block.decay = decay;
    block.beta = beta;
    std::int64_t column = 0;
    for (; column + kColumns * kLanes <= width; column += kColumns * kLanes) {
      pass<kColumns>(block, own, column);
    }
    for (; column < width; column += kLanes) {
      pass<1>(block, own, column);
    }
    for (std::int64_t row = 0; row < block.rows; ++row) {
      close(block.read + row * width, ends[sequence] + begin + row, head);
    }
  }

  // Rows [begin, stop) of a sequence through the memory of a key head's value heads in a slot.
  void pass_rows(std::int64_t sequence, std::int64_t group, std::int64_t slot, std::int64_t begin,
                 std::int64_t stop) const {
    const std::int64_t shared = heads / key_heads;
    float* queries = Scratch::mine().of(kRowsOfBlock * (2 * dim + 2 * width + 2));
    float* keys = queries + kRowsOfBlock * dim;
    float* values = keys + kRowsOfBlock * dim;
    float* read = values + kRowsOfBlock * width;
    float* more = read + kRowsOfBlock * width;
    for (; begin < stop; begin += kRowsOfBlock) {
      const std::int64_t size = std::min(stop - begin, kRowsOfBlock);
      for (std::int64_t row = 0; row < size; ++row) {
        convolve(sequence, begin + row, group * dim, dim, queries + row * dim);
        convolve(sequence, begin + row, (key_heads + group) * dim, dim, keys + row * dim);
        normalise(queries + row * dim, 1.0f / std::sqrt(static_cast<float>(dim)));
        normalise(keys + row * dim, 1.0f);
      }
      const Block block{queries, keys, nullptr, read,  nullptr, nullptr,
                        size,    dim,  width,   dim,   width};
      for (std::int64_t head = group * shared; head < (group + 1) * shared; ++head) {
        run_head(block, sequence, slot, begin, head, values, more);
      }
    }
  }

  void run(std::int64_t sequence, std::int64_t group) const {
    const std::int64_t shared = heads / key_heads;
    const std::int32_t *stop = stops + sequence * pieces, *slot = writes + sequence * pieces;
    std::int64_t begin = 0;
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      if (slot[piece] >= 0 && slot[piece] < slots) {
        open(sequence, piece, group * shared, shared, begin);
        pass_rows(sequence, group, slot[piece], begin, stop[piece]);
      }
      begin = stop[piece];
    }
    // The slot that is read may be among them: every row has been convolved, and that one is the
    // last to be written, since the others' inputs are in it, too.
    for (const bool is_read : {false, true}) {
      for (std::int64_t piece = 0; piece < pieces; ++piece) {
        if (slot[piece] >= 0 && slot[piece] < slots &&
            (slot[piece] == reads[sequence * pieces]) == is_read) {
          keep(sequence, slot[piece], stop[piece], group * dim, dim);
          keep(sequence, slot[piece], stop[piece], (key_heads + group) * dim, dim);
          keep(sequence, slot[piece], stop[piece], 2 * key_heads * dim + group * shared * width,
               shared * width);
        }
      }
    }
  }
};

// Buffers of a call, but for what came in of the state, which is what goes out.
struct Buffers {
  const ffi::AnyBuffer &x, &weights;
  const ffi::Buffer<ffi::DataType::F32> &rates, &log_decay, &rate_bias, &norm;
  const ffi::Buffer<ffi::DataType::S32> &ends, &stops, &reads, &writes, &starts, &again;
  ffi::AnyBuffer& out;
  ffi::Buffer<ffi::DataType::F32> &kept, &memory;
};

template <class Number>
void run(ffi::ThreadPool& pool, const Buffers& of, float eps) {
  const auto memory = of.memory.dimensions();
  Step<Number> step{};
  step.x = static_cast<const Number*>(of.x.untyped_data());
  step.weights = static_cast<const Number*>(of.weights.untyped_data());
  step.rates = of.rates.typed_data();
  step.log_decay = of.log_decay.typed_data();
  step.rate_bias = of.rate_bias.typed_data();
  step.norm = of.norm.typed_data();
  step.ends = of.ends.typed_data();
  step.stops = of.stops.typed_data();
  step.reads = of.reads.typed_data();
  step.writes = of.writes.typed_data();
  step.starts = of.starts.typed_data();
  step.again = of.again.typed_data();
  step.kept = of.kept.typed_data();
  step.memory = of.memory.typed_data();
  step.out = static_cast<Number*>(of.out.untyped_data());
  step.rows = of.x.dimensions()[0];
  step.sequences = of.starts.dimensions()[0];
  step.pieces = of.stops.dimensions()[1];
  step.slots = memory[0];
  step.heads = memory[1];
  step.dim = memory[2];
  step.width = memory[3];
  step.taps = of.weights.dimensions()[0];
  step.channels = of.weights.dimensions()[1];
  step.key_heads = (step.channels - step.heads * step.width) / (2 * step.dim);
  step.eps = eps;
  const std::int64_t rows = step.ends[step.sequences];
  const std::int64_t out_size = step.heads * step.width;
  std::memset(static_cast<void*>(step.out + rows * out_size), 0,
              (step.rows - rows) * out_size * sizeof(Number));
  share(pool, step.sequences * step.key_heads, rows, [&](std::int64_t task) {
    step.run(task / step.key_heads, task % step.key_heads);
  });
}

// Why these shapes cannot be; null where they can.
const char* wrong_shapes(const Buffers& of) {
  const auto x = of.x.dimensions(), weights = of.weights.dimensions();
  const auto kept = of.kept.dimensions(), memory = of.memory.dimensions();
  if (x.size() != 2 || weights.size() != 2 || kept.size() != 3 || memory.size() != 4) {
    return "a delta net takes x [T, C + H V], taps [W, C] and [M, W, C], and a memory [M, H, D, V]";
  }
  const std::int64_t heads = memory[1], dim = memory[2], values = heads * memory[3];
  const std::int64_t keys = weights[1] - values;
  if (dim % kLanes != 0 || memory[3] % kLanes != 0) {
    return "the heads of a delta net are whole vectors";
  }
  if (keys <= 0 || keys % (2 * dim) != 0 || heads % (keys / (2 * dim)) != 0) {
    return "the channels of a delta net are those of its heads";
  }
  if (x[1] != weights[1] + values || kept[1] != weights[0] || kept[2] != weights[1] ||
      kept[0] != memory[0]) {
    return "the rows of a delta net and what is kept have its channels";
  }
  const auto count = [](const auto& buffer) {
    return static_cast<std::int64_t>(buffer.element_count());
  };
  const std::int64_t sequences = count(of.starts);
  if (count(of.rates) != x[0] * 2 * heads || count(of.log_decay) != heads ||
      count(of.rate_bias) != heads || count(of.norm) != memory[3]) {
    return "each head of a delta net has two rates in a row, a decay and a bias";
  }
  if (count(of.ends) != sequences + 1 || count(of.again) != sequences ||
      count(of.out) != x[0] * values) {
    return "each sequence of a delta net has a first row and a start";
  }
  if (of.stops.dimensions().size() != 2 || count(of.stops) < sequences ||
      static_cast<std::int64_t>(of.stops.dimensions()[0]) != sequences ||
      count(of.reads) != count(of.stops) || count(of.writes) != count(of.stops)) {
    return "each piece of a delta net's rows has an end, and two slots";
  }
  return nullptr;
}

// See `jitney.kernels.delta_net`: x [T, C + H V], rates float32 [T, 2 H], weights [W, C], log decay,
// rate bias [H] and norm [V] float32, sequences int32, taps [M, W, C] and memory [M, H, D, V]
// float32 -> o [T, H V], and the same taps and memory behind the step.
ffi::Error delta_net(ffi::ThreadPool pool, ffi::AnyBuffer x,
                     ffi::Buffer<ffi::DataType::F32> rates, ffi::AnyBuffer weights,
                     ffi::Buffer<ffi::DataType::F32> log_decay,
                     ffi::Buffer<ffi::DataType::F32> rate_bias,
                     ffi::Buffer<ffi::DataType::F32> norm, ffi::Buffer<ffi::DataType::S32> ends,
                     ffi::Buffer<ffi::DataType::S32> stops, ffi::Buffer<ffi::DataType::S32> reads,
                     ffi::Buffer<ffi::DataType::S32> writes,
                     ffi::Buffer<ffi::DataType::S32> starts, ffi::Buffer<ffi::DataType::S32> again,
                     ffi::Buffer<ffi::DataType::F32> kept_before,
                     ffi::Buffer<ffi::DataType::F32> memory_before,
                     ffi::Result<ffi::AnyBuffer> out,
                     ffi::Result<ffi::Buffer<ffi::DataType::F32>> kept,
                     ffi::Result<ffi::Buffer<ffi::DataType::F32>> memory, float eps) {
  const Timed timed(Part::kDeltaNets);
  const Buffers of{x,     weights, rates,  log_decay, rate_bias, norm,  ends,   stops,
                   reads, writes,  starts, again,     *out,      *kept, *memory};
  if (const char* why = wrong_shapes(of)) {
    return refused(why);
  }
  if (kept_before.untyped_data() != kept->untyped_data() ||
      memory_before.untyped_data() != memory->untyped_data()) {
    return refused("the state of a delta net is written where it lies");
  }
  const ffi::DataType dtype = x.element_type();
  if (out->element_type() != dtype || weights.element_type() != dtype) {
    return refused("rows and taps of a delta net have one dtype");
  }
  if (dtype == ffi::DataType::F32) {
    run<float>(pool, of, eps);
  } else if (dtype == ffi::DataType::BF16) {
    run<Bfloat16>(pool, of, eps);
  } else {
    return refused("a delta net takes float32 or bfloat16");
  }
  return ffi::Error::Success();
}

// The memory of a step's rows alone: what a head of a sequence reads, one row after the other.
struct Recurrence {
  const float *queries, *keys, *values, *decay;
  const std::int32_t *ends, *starts;
  const std::int32_t *stops, *reads, *writes;  // [sequences, pieces]
  float *read, *memory;
  std::int64_t groups, heads, dim, width, slots, pieces;

  void run(std::int64_t sequence, std::int64_t head) const {
    const std::int64_t size = dim * width;
    std::int64_t begin = 0;
    for (std::int64_t at = sequence * pieces; at < (sequence + 1) * pieces; ++at) {
      if (writes[at] >= 0 && writes[at] < slots) {
        float* own = memory + (writes[at] * heads + head) * size;
        carry(own, memory + (reads[at] * heads + head) * size, size,
              begin == 0 && starts[sequence] == 0);
        pass_rows(sequence, head, own, begin, stops[at]);
      }
      begin = stops[at];
    }
  }

  // Rows [begin, stop) of a sequence through the memory of a head.
  void pass_rows(std::int64_t sequence, std::int64_t head, float* own, std::int64_t begin,
                 std::int64_t stop) const {
    float* decays = Scratch::mine().of(kRowsOfBlock);
    const std::int64_t group = head / (heads / groups);
    for (; begin < stop; begin += kRowsOfBlock) {
      const std::int64_t size = std::min(stop - begin, kRowsOfBlock);
      const std::int64_t first = ends[sequence] + begin;
      const std::int64_t key = (first * groups + group) * dim;
      const std::int64_t value = (first * heads + head) * width;
      for (std::int64_t row = 0; row < size; ++row) {
        decays[row] = decay[(first + row) * heads + head];
      }
      const Block block{queries + key, keys + key, values + value, read + value,
                        decays,        nullptr,    size,           dim,
                        width,         groups * dim, heads * width};
      std::int64_t column = 0;
      for (; column + kColumns * kLanes <= width; column += kColumns * kLanes) {
        pass<kColumns, false>(block, own, column);
      }
      for (; column < width; column += kLanes) {
        pass<1, false>(block, own, column);
      }
    }
  }
};

// See `jitney.kernels.delta_net.Recur` without beta: queries and keys [T, G, D], values [T, H, V],
// decay [T, H], sequences int32 and memory [M, H, D, V] -> what is read, [T, H, V], which is 0 in
// rows of padding, and the same memory behind the step.
ffi::Error recur(ffi::ThreadPool pool, ffi::Buffer<ffi::DataType::F32> queries,
                 ffi::Buffer<ffi::DataType::F32> keys, ffi::Buffer<ffi::DataType::F32> values,
                 ffi::Buffer<ffi::DataType::F32> decay, ffi::Buffer<ffi::DataType::S32> ends,
                 ffi::Buffer<ffi::DataType::S32> stops, ffi::Buffer<ffi::DataType::S32> reads,
                 ffi::Buffer<ffi::DataType::S32> writes, ffi::Buffer<ffi::DataType::S32> starts,
                 ffi::Buffer<ffi::DataType::F32> before,
                 ffi::Result<ffi::Buffer<ffi::DataType::F32>> read,
                 ffi::Result<ffi::Buffer<ffi::DataType::F32>> memory) {
  const Timed timed(Part::kDeltaNets);
  const auto sizes = memory->dimensions(), of_keys = keys.dimensions();
  const std::int64_t rows = values.dimensions()[0];
  if (sizes.size() != 4 || of_keys.size() != 3 || values.dimensions().size() != 3 ||
      of_keys[2] != sizes[2] || sizes[1] % of_keys[1] != 0 || of_keys[0] != rows ||
      values.dimensions()[1] != sizes[1] || values.dimensions()[2] != sizes[3] ||
      queries.element_count() != keys.element_count() ||
      read->element_count() != values.element_count() ||
      static_cast<std::int64_t>(decay.element_count()) != rows * sizes[1] ||
      ends.element_count() != starts.element_count() + 1 || stops.dimensions().size() != 2 ||
      static_cast<std::size_t>(stops.dimensions()[0]) != starts.element_count() ||
      reads.element_count() != stops.element_count() ||
      writes.element_count() != stops.element_count()) {
    return refused("rows and memory of a recurrent layer have the same heads");
  }
  if (sizes[2] % 2 != 0 || sizes[3] % kLanes != 0) {
    return refused("the heads of a recurrent layer are whole vectors");
  }
  if (before.untyped_data() != memory->untyped_data()) {
    return refused("the memory of a recurrent layer is written where it lies");
  }
  const Recurrence own{queries.typed_data(), keys.typed_data(),   values.typed_data(),
                       decay.typed_data(),   ends.typed_data(),   starts.typed_data(),
                       stops.typed_data(),   reads.typed_data(),  writes.typed_data(),
                       read->typed_data(),   memory->typed_data(), of_keys[1],
                       sizes[1],             sizes[2],            sizes[3],
                       sizes[0],             stops.dimensions()[1]};
  const std::int64_t sequences = static_cast<std::int64_t>(starts.element_count());
  const std::int64_t real = own.ends[sequences];
  std::memset(own.read + real * own.heads * own.width, 0,
              (rows - real) * own.heads * own.width * sizeof(float));
  share(pool, sequences * own.heads, real,
        [&](std::int64_t task) { own.run(task / own.heads, task % own.heads); });
  return ffi::Error::Success();
}

}  // namespace delta
}  // namespace
}  // namespace jitney

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_recur, jitney::delta::recur,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_delta_net, jitney::delta::delta_net,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::F32>>()
                                  .Attr<float>("eps"));
#pragma GCC visibility pop

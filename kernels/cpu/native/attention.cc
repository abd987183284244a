// Paged attention: flash attention (arXiv 2205.14135) over the pages as they lie.
//
// A decoding row, or one that was, goes through its keys and values once, kSpan positions at a
// time, as fast as memory brings them; a block of prompt rows goes through them in chunks, turned
// and widened once per chunk, with both products in registers. Nothing is computed for keys a row
// cannot see (but the rest of a span or chunk), for absent sequences, or for padding. Axes as in
// jitney/kernels/interface.py; G = H / K rows share a key head.
#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "parts.h"
#include "tasks.h"
#include "tiles.h"

namespace jitney {
namespace {

namespace ffi = xla::ffi;

constexpr Index kSpan = 16;       // keys that a decoding row takes at a time
constexpr Index kKeys = 96;       // keys per chunk of a prompt block
constexpr Index kBlockRows = 96;  // rows of a prompt block, all G heads counted
constexpr Index kScoreRows = 4;   // rows of a score tile
constexpr Index kSoftened = 4;    // rows that are softened at once
// Score of a key that a row must not see; finite, so that no row ends as NaN.
constexpr float kHidden = -1e30f;
constexpr float kLog2E = 1.44269504f;

// One call.
struct Call {
  const void* q;              // [T, H, D]
  const void* kv;             // [N, page, 2K, D], or [N, page, K, D] without values
  const std::int32_t* lens;   // [S] tokens of each sequence
  const std::int32_t* cu_q;   // [S + 1] first row of each sequence
  const std::int32_t* table;  // [S, P] pages
  const float* sinks;         // [H] scores that no key has, or none
  void* o;                    // [T, H, V]
  Index decoding;             // sequences with one row, which come first
  Index again;                // sequences behind them whose rows are computed like theirs
  Index present;              // sequences in all
  Index heads;                // H
  Index kv_heads;             // K
  Index size;                 // D
  Index value_size;           // V
  bool keys_alone;            // a key's first numbers are its value
  Index page;                 // positions of a page
  Index table_width;          // P
  Index window;               // positions that a row sees, its own included; 0: all
  float scale;                // of a product of query and key
  float softcap;              // scores are softcap * tanh(score / softcap); 0: as they are

  // Of what stands among the scores, in powers of 2: `cap` has scaled them already.
  float factor() const { return softcap > 0 ? kLog2E : scale * kLog2E; }
  Index group() const { return heads / kv_heads; }
  Index planes() const { return keys_alone ? 1 : 2; }
  Index width() const { return planes() * kv_heads * size; }  // elements of a position of the pool
  // Where in a position those of a key head and of its value begin.
  Index key_at(Index head) const { return planes() * head * size; }
  Index value_at(Index head) const { return (planes() * (head + 1) - 1) * size; }
  Index block() const { return std::max<Index>(4, kBlockRows / group()); }  // prompt rows of a task
  Index first_prompt() const { return decoding + again; }
  Index alone() const { return cu_q[first_prompt()]; }  // rows that are computed each by itself
  Index blocks_of(Index sequence) const {
    return parts(cu_q[sequence + 1] - cu_q[sequence], block());
  }
};

// The running softmax of one row.
struct State {
  float most;  // greatest score, times the factor; kHidden: no key was seen yet
  float sum;   // of its weights
};

// What the row of a head has seen before its first key: its sink, which weighs no value.
inline State unseen(const Call& call, Index head) {
  return call.sinks == nullptr ? State{kHidden, 0.0f} : State{call.sinks[head] * kLog2E, 1.0f};
}

// The elements of position `position` of a sequence, all heads.
template <class Number>
const Number* position_of(const Call& call, const std::int32_t* pages, Index position) {
  const Index row = Index{pages[position / call.page]} * call.page + position % call.page;
  return static_cast<const Number*>(call.kv) + row * call.width();
}

// The elements of `count` positions, `start` and those after it, and those of the last one again
// until there are `whole`. It is divided once: a division takes as long as all else that is done
// for a position.
template <class Number>
void find_positions(const Call& call, const std::int32_t* pages, Index start, Index count,
                    Index whole, const Number** rows) {
  const Number* pool = static_cast<const Number*>(call.kv);
  Index page = start / call.page, offset = start % call.page;
  for (Index j = 0; j < count; ++j) {
    rows[j] = pool + (Index{pages[page]} * call.page + offset) * call.width();
    ++offset;
    if (offset == call.page) {
      offset = 0;
      ++page;
    }
  }
  std::fill(rows + count, rows + whole, rows[count - 1]);
}

// Give the scores from `first` up to `last` no weight.
inline void hide(float* scores, Index first, Index last) {
  for (Index j = first; j < last; ++j) {
    scores[j] = kHidden;
  }
}

// softcap * tanh(score * scale / softcap), over `count` products of queries and keys.
inline void cap(const Call& call, float* scores, Index count) {
  const Floats inner = splat(-2.0f * kLog2E * call.scale / call.softcap);
  const Floats outer = splat(call.softcap);
  for (Index i = 0; i < count; i += kLanes) {
    const Floats score = load(scores + i);
    const Ints sign = as_ints(score) & (1 << 31);
    const Floats magnitude = as_floats(as_ints(score) ^ sign);
    const Floats shrunk = exp2_of(magnitude * inner);
    const Floats capped = outer * (1.0f - shrunk) / (1.0f + shrunk);  // tanh, from exp(-2 |x|)
    store(as_floats(as_ints(capped) | sign), scores + i);
  }
}

// kSoftened rows of `count` scores, a multiple of kLanes, kPitch apart, become weights, 2 **
// ((score - greatest) * factor), written over the scores, as Weight into the front of their row;
// what their sums [size] held is scaled down to match, unless nothing was summed. A row's maximum
// and sum each end in a chain of exchanges within one register: rows that stand side by side wait
// for theirs at the same time.
template <class Weight, int kPitch>
void soften(float* scores, Index count, State* states, float* sums, Index size, float factor,
            bool first) {
  const Floats wide = splat(factor);
  alignas(kLine) float shrink[kLanes] = {};  // of the rows, all powers in one vector
  Floats totals[kSoftened], offsets[kSoftened];
  for (int r = 0; r < kSoftened; ++r) {
    Floats here = load(scores + r * kPitch);
    for (Index i = kLanes; i < count; i += kLanes) {
      here = greater(here, load(scores + r * kPitch + i));
    }
    const float most = greatest(here), before = states[r].most;
    const float here_most = most > kHidden ? most * factor : kHidden;
    states[r].most = before > here_most ? before : here_most;
    shrink[r] = before - states[r].most;
    // What no key was seen of yet weighs nothing.
    offsets[r] = splat(states[r].most > kHidden ? -states[r].most : 0.0f);
    totals[r] = Floats{};
  }
  store(exp2_of(load(shrink)), shrink);
  for (Index i = 0; i < count; i += kLanes) {
    for (int r = 0; r < kSoftened; ++r) {
      float* row = scores + r * kPitch;
      const Floats weights = exp2_of<Weight>(multiply_add(load(row + i), wide, offsets[r]));
      totals[r] += weights;
      store(weights, reinterpret_cast<Weight*>(row) + i);
    }
  }
  for (int r = 0; r < kSoftened; ++r) {
    states[r].sum = total(totals[r]) + states[r].sum * shrink[r];
  }
  if (first) {
    return;
  }
  for (int r = 0; r < kSoftened; ++r) {
    const Floats less = splat(shrink[r]);
    for (Index i = 0; i < size; i += kLanes) {
      store(load(sums + r * size + i) * less, sums + r * size + i);
    }
  }
}

// How a dtype's decoding rows are multiplied: queries with keys, and weights with values.
template <class Number, class Keys>
struct Decoding {
  using Query = typename Keys::Left;
  using Key = typename Keys::Right;
  using Values = std::conditional_t<std::is_same_v<Number, float>, Single, Widened>;

  // Scores [H, kSpan] of all heads against kSpan keys; asks for the kSpan positions at `later`,
  // unless there are none.
  static void score(const Call& call, const Query* queries, const Number* keys, float* scores,
                    const Number* later) {
    constexpr Index per_word = sizeof(Key) / sizeof(Number);
    const Index words = call.size / per_word, stride = call.width() / per_word;
    const Index asked = padded(kSpan * call.width() * sizeof(Number) / call.heads, kLine);
    for (Index head = 0; head < call.heads; ++head) {
      const auto* key = reinterpret_cast<const Key*>(keys + call.key_at(head / call.group()));
      for (Index j = 0; j < kSpan; j += kDots) {
        const Query* query = queries + head * words;
        float* to = scores + head * kSpan + j;
        // Straight code for the sizes that most models have.
        if (words == 32) {
          dots<Keys, 1, kDots>(query, 0, key + j * stride, stride, to, 0, 32);
        } else if (words == 64) {
          dots<Keys, 1, kDots>(query, 0, key + j * stride, stride, to, 0, 64);
        } else {
          dots<Keys, 1, kDots>(query, 0, key + j * stride, stride, to, 0, words);
        }
      }
      if (later != nullptr) {
        prefetch_second(reinterpret_cast<const char*>(later) + head * asked, asked);
      }
    }
  }

  // sums [H, V] (+)= weights [H, kSpan] times the values of `count` positions.
  static void sum_values(const Call& call, const float* weights, const Number* keys, float* sums,
                         Index count, bool add) {
    const Index size = call.value_size;
    const Index vectors = vectors_for(1, size / kLanes), columns = vectors * kLanes;
    Index heads = std::min(rows_for(vectors), call.group());
    while (call.group() % heads != 0) {
      --heads;
    }
    const auto multiply = tile_for<Values, 0>(heads, vectors);
    for (Index head = 0; head < call.heads; head += heads) {
      const Number* values = keys + call.value_at(head / call.group());
      for (Index column = 0; column < size; column += columns) {
        multiply(weights + head * kSpan, kSpan, values + column, call.width(),
                 sums + head * size + column, size, count, add, {});
      }
    }
  }
};

// Memory of one decoding row; R is H rounded up to whole kSoftened, heads that are not there.
template <class Number>
struct RowMemory {
  Index rows;      // R
  float* queries;  // [H, D], where they are widened
  float* sums;     // [R, V]
  float* scores;   // [R, kSpan]
  State* states;   // [R]
  Number* copy;    // kSpan positions, where a span may lie in several pages

  RowMemory(const Call& call, bool scattered) : rows(padded(call.heads, kSoftened)) {
    const Index heads = call.heads, size = call.value_size;
    const Index copied = scattered ? kSpan * call.width() * Index{sizeof(Number)} / 4 : 0;
    queries = Scratch::mine().of(heads * call.size + rows * (size + kSpan + 2) + copied);
    sums = queries + heads * call.size;
    scores = sums + rows * size;
    states = reinterpret_cast<State*>(scores + rows * kSpan);
    copy = reinterpret_cast<Number*>(states + rows);
    std::fill(states + heads, states + rows, State{kHidden, 0.0f});
    for (Index head = 0; head < heads; ++head) {
      states[head] = unseen(call, head);
    }
    std::fill(scores + heads * kSpan, scores + rows * kSpan, kHidden);
    std::fill(sums + heads * size, sums + rows * size, 0.0f);
  }
};

// Positions [start, start + count) of a sequence, one after the other; the last one fills the span.
template <class Number>
void copy_span(const Call& call, const std::int32_t* pages, Index start, Index count, Number* to) {
  const Index width = call.width();
  const Number* rows[kSpan];
  find_positions(call, pages, start, count, kSpan, rows);
  for (Index j = 0; j < kSpan; ++j) {
    std::memcpy(to + j * width, rows[j], width * sizeof(Number));
  }
}

// All heads of one decoding row, keys `first` to n_keys of the sequence with these pages.
template <class Number, class Keys>
void decode_row(const Call& call, Index row, const std::int32_t* pages, Index first, Index n_keys) {
  using How = Decoding<Number, Keys>;
  using Query = typename How::Query;
  const Index size = call.value_size;
  const Index row_size = call.heads * call.size;
  const bool scattered = call.page % kSpan != 0;
  const RowMemory<Number> memory(call, scattered);
  const Number* q = static_cast<const Number*>(call.q) + row * row_size;
  const Query* queries = reinterpret_cast<const Query*>(q);
  if constexpr (sizeof(Query) != sizeof(Number) && std::is_same_v<Query, float>) {
    copy_row(q, memory.queries, row_size);
    queries = memory.queries;
  }
  const Index begin = first - first % kSpan;
  if (!scattered) {
    const Number* soon = position_of<Number>(call, pages, begin);
    prefetch_second(soon, kSpan * call.width() * sizeof(Number));
  }
  for (Index start = begin; start < n_keys; start += kSpan) {
    const Index count = std::min(kSpan, n_keys - start);
    const Index next = start + kSpan;
    const Number* keys = memory.copy;
    const Number* later = nullptr;
    if (scattered) {
      copy_span(call, pages, start, count, memory.copy);
    } else {
      keys = position_of<Number>(call, pages, start);
      later = next < n_keys ? position_of<Number>(call, pages, next) : nullptr;
    }
    How::score(call, queries, keys, memory.scores, later);
    if (call.softcap > 0) {
      cap(call, memory.scores, call.heads * kSpan);
    }
    if (count < kSpan || start < first) {
      for (Index head = 0; head < call.heads; ++head) {
        hide(memory.scores + head * kSpan, count, kSpan);
        hide(memory.scores + head * kSpan, 0, first - start);
      }
    }
    for (Index head = 0; head < memory.rows; head += kSoftened) {
      soften<float, kSpan>(memory.scores + head * kSpan, kSpan, memory.states + head,
                           memory.sums + head * size, size, call.factor(), start == begin);
    }
    How::sum_values(call, memory.scores, keys, memory.sums, count, start > begin);
  }
  Number* o = static_cast<Number*>(call.o) + row * call.heads * size;
  for (Index head = 0; head < call.heads; ++head) {
    copy_row(memory.sums + head * size, o + head * size, size, 1.0f / memory.states[head].sum);
  }
}

// Whether a kind takes bfloat16 two by two.
template <class Kind>
constexpr bool kPaired = std::is_same_v<typename Kind::Left, Pair>;

// How a dtype's prompt rows are multiplied. An element of a row of queries or keys, and of a column
// of values, is one number, widened to float32, or, with Pairs, two neighbours in bfloat16: half
// the instructions.
template <class Number, class Kind>
struct Prompting {
  using Element = typename Kind::Left;
  using Weight = std::conditional_t<kPaired<Kind>, Bfloat16, float>;
  // What rows of keys are turned as: elements where they lie as such, numbers to be widened where
  // not.
  using Turned = std::conditional_t<kPaired<Kind>, Pair, Number>;
  static constexpr Index kNumbers = kPaired<Kind> ? 2 : 1;  // of an element
  static_assert(sizeof(Element) == 4);

  // Keys of `count` positions, turned, [D / kNumbers, kKeys], and their values, [kKeys /
  // kNumbers, V].
  static void read(const Call& call, Index head, const std::int32_t* pages, Index start,
                   Index count, float* keys, float* values) {
    const Index elements = call.size / kNumbers, whole = padded(count, kLanes);
    const Index key = call.key_at(head), value = call.value_at(head), size = call.value_size;
    const Number* rows[kKeys];
    find_positions(call, pages, start, count, whole, rows);
    for (Index j = 0; j < whole; j += kLanes) {
      for (Index column = 0; column < elements; column += kLanes) {
        Floats square[kLanes];
        repeat<kLanes>([&](auto lane) {
          square[lane] = load(reinterpret_cast<const Turned*>(rows[j + lane] + key) + column);
        });
        transpose(square);
        repeat<kLanes>(
            [&](auto lane) { store(square[lane], keys + (column + lane) * kKeys + j); });
      }
    }
    for (Index j = 0; j < count; j += kNumbers) {
      const Number* here = rows[j] + value;
      if constexpr (kPaired<Kind>) {
        const Number* next = rows[j + 1] + value;
        for (Index i = 0; i < size; i += kLanes) {
          const Ints low = (as_ints(load(here + i)) >> 16) & 0xFFFF;
          store(as_floats(low | as_ints(load(next + i))), values + j / 2 * size + i);
        }
      } else {
        copy_row(here, values + j * size, size);
      }
    }
  }

  // C [rows, columns] (+)= A [rows, n] times B [n, columns], rows rounded up to whole tiles.
  static void multiply(const float* a, Index lda, const float* b, Index ldb, float* c, Index ldc,
                       Index rows, Index tall, Index columns, Index n, bool add,
                       RegistersOf<Kind>& registers) {
#if JITNEY_AMX
    if constexpr (kAmx<Kind>) {
      const amx::Product<Kind> product{reinterpret_cast<const Element*>(a),
                                       lda,
                                       reinterpret_cast<const Element*>(b),
                                       ldb,
                                       c,
                                       ldc,
                                       n,
                                       add};
      amx::Soon soon;
      amx::multiply<Kind, amx::Near::kColumns, 0>(product, rows, columns, soon, registers);
      return;
    }
#endif
    const Index vectors = vectors_for(tall, columns / kLanes);
    const auto tile = tile_for<Kind, 0>(tall, vectors);
    for (Index row = 0; row < rows; row += tall) {
      for (Index column = 0; column < columns; column += vectors * kLanes) {
        tile(reinterpret_cast<const Element*>(a + row * lda), lda,
             reinterpret_cast<const Element*>(b + column), ldb, c + row * ldc + column, ldc, n,
             add, {});
      }
    }
  }
};

// A block of a prompt's rows, the G heads of one key head: count * G rows in a tile.
struct Piece {
  Index head;                 // key head
  const std::int32_t* pages;  // of the sequence
  Index row;                  // its first row
  Index position;             // and that row's position
  Index count;                // rows
};

// Memory of one such block; R is the most rows of a tile, rounded up to whole tiles.
template <class Kind>
struct BlockMemory {
  Index tall;      // rows of a tile of sums
  float* queries;  // [R, D]
  float* sums;     // [R, V]
  float* scores;   // [R, kKeys]
  float* keys;     // [D, kKeys]
  float* values;   // [kKeys, V]
  State* states;   // [R]

  explicit BlockMemory(const Call& call) {
    const Index size = call.size, value_size = call.value_size, both = size + value_size;
    tall = rows_for(vectors_for(1, value_size / kLanes));
    const Index whole = padded(call.block() * call.group(), tall);
    const Index rows = padded(whole, kScoreRows) + kMostRows;
    queries = Scratch::mine().of(rows * (both + kKeys + 2) + kKeys * both);
    sums = queries + rows * size;
    scores = sums + rows * value_size;
    keys = scores + rows * kKeys;
    values = keys + kKeys * size;
    states = reinterpret_cast<State*>(values + kKeys * value_size);
    std::fill(states, states + rows, State{kHidden, 0.0f});
  }
};

// Give no weight to what the rows of a block do not see of the `seen` keys from `start` on, nor to
// what stands after them up to `count`.
inline void hide_unseen(const Call& call, const Piece& piece, Index start, Index seen, Index count,
                        float* scores) {
  const Index group = call.group(), last = piece.position + piece.count - 1;
  const bool newest_seen = piece.position - start + 1 >= count;  // by the first row
  const bool oldest_seen = call.window == 0 || last - call.window < start;  // by the last row
  if (newest_seen && oldest_seen) {
    return;
  }
  for (Index t = 0; t < piece.count; ++t) {
    const Index here = piece.position + t - start;  // the rows' own in the chunk
    const Index from = std::max<Index>(0, std::min(here + 1, seen));
    const Index until = call.window > 0 ? std::min(seen, here + 1 - call.window) : 0;
    for (Index r = t * group; r < (t + 1) * group; ++r) {
      hide(scores + r * kKeys, from, count);
      hide(scores + r * kKeys, 0, until);
    }
  }
}

// The rows of one block of a prompt.
template <class Number, class Kind>
void prompt_block(const Call& call, const Piece& piece) {
  using How = Prompting<Number, Kind>;
  const Index group = call.group();
  const Index size = call.size, value_size = call.value_size;
  const Index elements = size / How::kNumbers;
  const Index rows = piece.count * group;
  const BlockMemory<Kind> memory(call);
  RegistersOf<Kind> registers;
  const Index at = piece.row * call.heads + piece.head * group;  // the first row's first head
  for (Index t = 0; t < piece.count; ++t) {
    const Number* q = static_cast<const Number*>(call.q) + (at + t * call.heads) * size;
    if constexpr (kPaired<Kind>) {
      std::memcpy(memory.queries + t * group * elements, q, group * size * sizeof(Number));
    } else {
      copy_row(q, memory.queries + t * group * size, group * size);
    }
    for (Index head = 0; head < group; ++head) {
      memory.states[t * group + head] = unseen(call, piece.head * group + head);
    }
  }
  // Chunks begin at the same positions for every block, so that a row's sums are the same bits in
  // all of them.
  const Index oldest = call.window > 0 ? std::max<Index>(0, piece.position + 1 - call.window) : 0;
  const Index first = oldest / kKeys * kKeys;
  const Index end = piece.position + piece.count;
  for (Index start = first; start < end; start += kKeys) {
    const Index seen = std::min(kKeys, end - start);
    How::read(call, piece.head, piece.pages, start, seen, memory.keys, memory.values);
    const Index count = padded(seen, kLanes);
    How::multiply(memory.queries, elements, memory.keys, kKeys, memory.scores, kKeys, rows,
                  kScoreRows, count, elements, false, registers);
    if (call.softcap > 0) {
      cap(call, memory.scores, rows * kKeys);
    }
    hide_unseen(call, piece, start, seen, count, memory.scores);
    for (Index r = 0; r < rows; r += kSoftened) {
      soften<typename How::Weight, kKeys>(memory.scores + r * kKeys, count, memory.states + r,
                                           memory.sums + r * value_size, value_size,
                                           call.factor(), start == first);
    }
    const Index weighed = (seen + How::kNumbers - 1) / How::kNumbers;
    How::multiply(memory.scores, kKeys, memory.values, value_size, memory.sums, value_size, rows,
                  memory.tall, value_size, weighed, start > first, registers);
  }
  Number* o = static_cast<Number*>(call.o);
  for (Index r = 0; r < rows; ++r) {
    const Index place = at + r / group * call.heads + r % group;
    copy_row(memory.sums + r * value_size, o + place * value_size, value_size,
             1.0f / memory.states[r].sum);
  }
}

// Blocks of prompt rows first, they are the largest; then a ticket for each row that is computed
// by itself, in order.
template <class Number, class Keys, class Kind>
void run_ticket(const Call& call, Index ticket) {
  for (Index sequence = call.first_prompt(); sequence < call.present; ++sequence) {
    const Index here = call.blocks_of(sequence) * call.kv_heads;
    if (ticket >= here) {
      ticket -= here;
      continue;
    }
    const Index offset = ticket / call.kv_heads * call.block();
    const Index row = call.cu_q[sequence], end = call.cu_q[sequence + 1];
    Piece piece;
    piece.head = ticket % call.kv_heads;
    piece.pages = call.table + sequence * call.table_width;
    piece.row = row + offset;
    piece.position = call.lens[sequence] - (end - row) + offset;
    piece.count = std::min(call.block(), end - row - offset);
    prompt_block<Number, Kind>(call, piece);
    return;
  }
  Index sequence = std::min(ticket, call.decoding);
  while (call.cu_q[sequence + 1] <= ticket) {
    ++sequence;
  }
  const Index n_keys = call.lens[sequence] - (call.cu_q[sequence + 1] - ticket) + 1;
  const Index first = call.window > 0 ? std::max<Index>(0, n_keys - call.window) : 0;
  decode_row<Number, Keys>(call, ticket, call.table + sequence * call.table_width, first, n_keys);
}

// The tickets of a call that has rows of both kinds, by kind: a block of prompt rows and a decoding
// row run beside each other, so the call's time is theirs in proportion to that of their threads.
struct Mixed {
  std::atomic<std::int64_t> decoding{0}, prompts{0};  // nanoseconds of all threads

  void add(bool decodes, std::int64_t nanoseconds) {
    (decodes ? decoding : prompts).fetch_add(nanoseconds, std::memory_order_relaxed);
  }

  // Nanoseconds of a call.
  void divide(std::int64_t taken) const {
    const std::int64_t all = decoding + prompts;
    const auto share = static_cast<double>(decoding) / static_cast<double>(all > 0 ? all : 1);
    const auto of_decoding = static_cast<std::int64_t>(share * static_cast<double>(taken));
    add_time(Part::kDecodeAttention, of_decoding);
    add_time(Part::kPromptAttention, taken - of_decoding);
  }
};

template <class Number, class Keys, class Kind>
void run(ffi::ThreadPool& pool, const Call& call, Index rows, Index all_rows) {
  const Watch watch;
  const Index row_size = call.heads * call.value_size;
  Number* o = static_cast<Number*>(call.o);
  std::memset(o + rows * row_size, 0,
              (all_rows - rows) * row_size * sizeof(Number));  // padding rows
  Index tickets = call.alone();
  for (Index sequence = call.first_prompt(); sequence < call.present; ++sequence) {
    tickets += call.blocks_of(sequence) * call.kv_heads;
  }
  const Index blocks = tickets - call.alone();
  if (blocks == 0 || call.alone() == 0) {
    share(pool, tickets, all_rows,
          [&](Index ticket) { run_ticket<Number, Keys, Kind>(call, ticket); });
    add_time(blocks > 0 ? Part::kPromptAttention : Part::kDecodeAttention, watch.elapsed());
    return;
  }
  Mixed mixed;
  share(pool, tickets, all_rows, [&](Index ticket) {
    const Watch own;
    run_ticket<Number, Keys, Kind>(call, ticket);
    mixed.add(ticket >= blocks, own.elapsed());
  });
  mixed.divide(watch.elapsed());
}

// q [T, H, D], kv [N, page, 2K, D] of one dtype, kv_lens [S], cu_q [S + 1], table [S, P], counts
// [3] or [4], and sinks [H] where heads have some -> o [T, H, D]. value_dim > 0: kv [N, page, K, D]
// of keys, whose first so many numbers are their values -> o [T, H, value_dim].
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer kv,
                     ffi::Buffer<ffi::S32> kv_lens, ffi::Buffer<ffi::S32> cu_q,
                     ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> counts,
                     ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> o, float scale, float softcap,
                     std::int64_t window, std::int64_t value_dim) {
  const auto qs = q.dimensions(), ks = kv.dimensions(), ts = table.dimensions(),
             os = o->dimensions();
  if (qs.size() != 3 || ks.size() != 4 || ts.size() != 2 || os.size() != 3 || qs[2] != ks[3] ||
      os[0] != qs[0] || os[1] != qs[1] || os[2] != (value_dim > 0 ? value_dim : qs[2])) {
    return refused("attention takes q [T, H, D] and a pool [N, page, 2K, D]");
  }
  const Index planes = value_dim > 0 ? 1 : 2;
  if (qs[2] % 16 != 0 || os[2] % 16 != 0 || os[2] > qs[2] || ks[2] < planes ||
      ks[2] % planes != 0 || qs[1] % (ks[2] / planes) != 0) {
    return refused("a head is whole vectors of 16, and key heads divide the query heads");
  }
  const Index seqs = ts[0];
  if (static_cast<Index>(kv_lens.element_count()) != seqs ||
      static_cast<Index>(cu_q.element_count()) != seqs + 1 ||
      (counts.element_count() != 3 && counts.element_count() != 4)) {
    return refused("attention takes kv_lens [S], cu_q [S + 1], table [S, P] and counts [3] or [4]");
  }
  const std::int32_t* count = counts.typed_data();
  const Index again = counts.element_count() == 4 ? count[3] : 0;
  if (count[0] < 0 || again < 0 || count[0] + again > count[1] || count[1] > seqs ||
      count[2] < 0 || count[2] > qs[0]) {
    return refused("counts say more sequences or rows than there are");
  }
  const auto sinks = rest.get<ffi::Buffer<ffi::F32>>(0);
  if (rest.size() > 1 || (rest.size() == 1 && !sinks.has_value()) ||
      (sinks.has_value() && static_cast<Index>(sinks->element_count()) != qs[1])) {
    return refused("sinks are float32 [H]");
  }
  Call call;
  call.sinks = sinks.has_value() ? sinks->typed_data() : nullptr;
  call.q = q.untyped_data();
  call.kv = kv.untyped_data();
  call.lens = kv_lens.typed_data();
  call.cu_q = cu_q.typed_data();
  call.table = table.typed_data();
  call.o = o->untyped_data();
  call.decoding = count[0];
  call.again = again;
  call.present = count[1];
  call.heads = qs[1];
  call.kv_heads = ks[2] / planes;
  call.size = qs[2];
  call.value_size = os[2];
  call.keys_alone = value_dim > 0;
  call.page = ks[1];
  call.table_width = ts[1];
  call.window = window;
  call.scale = scale;
  call.softcap = softcap;
  const ffi::DataType dtype = q.element_type();
  if (kv.element_type() != dtype || o->element_type() != dtype) {
    return refused("q, the pool and the result of attention have one dtype");
  }
  if (dtype == ffi::DataType::F32) {
    run<float, Single, Single>(pool, call, count[2], qs[0]);
  } else if (dtype == ffi::DataType::BF16) {
#if JITNEY_PAIRS
    if (qs[2] % (2 * kLanes) == 0) {
      run<Bfloat16, Pairs, Pairs>(pool, call, count[2], qs[0]);
      return ffi::Error::Success();
    }
#endif
    run<Bfloat16, Widened, Single>(pool, call, count[2], qs[0]);
  } else {
    return refused("attention takes float32 or bfloat16");
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jitney

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(jitney_attention, jitney::attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<std::int64_t>("window")
                                  .Attr<std::int64_t>("value_dim"));
#pragma GCC visibility pop

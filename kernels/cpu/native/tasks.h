// Calls cut into tasks that share XLA's own threads.
//
// XLA's pool is asked for helpers, and the calling thread works too, so a call never waits for a
// helper that has not started. Tasks are drawn as tickets, downwards, from a block of permanent
// memory: a helper that comes late finds none left, or draws one of the newer call that has the
// block by then, and reads what to do only after it has drawn. So nobody touches the frame of a
// call that has ended: a call ends when every ticket that was drawn is done.
//
// Tickets lie in as many runs as there are threads. A thread begins with the run that it had in the
// last call and helps the others when that is done: neighbouring tickets write neighbouring memory,
// and what one product writes the next one reads, so most of it stays in one core's cache.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include <sched.h>

#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jitney {

// Most runs of tickets; more threads share them.
constexpr int kRuns = 32;

// Tickets one after the other.
struct alignas(kLine) Run {
  std::atomic<std::int64_t> left{0};  // not drawn yet; anything below 1 is none
  std::atomic<bool> begun{false};     // by a thread that begins with it
};

// Threads this process may run at once.
inline std::int64_t threads() {
  static const std::int64_t count = [] {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
      return static_cast<std::int64_t>(CPU_COUNT(&allowed));
    }
    return static_cast<std::int64_t>(std::thread::hardware_concurrency());
  }();
  return count;
}

// Runs of every call.
inline int run_count() { return static_cast<int>(std::min<std::int64_t>(threads(), kRuns)); }

// One call's tickets. A block serves one call at a time, of whatever kernel.
struct Block {
  Run runs[kRuns];
  alignas(kLine) std::atomic<std::int64_t> done{0};  // tasks done
  std::atomic<bool> taken{false};                    // by a call
  std::atomic<std::int64_t> patience{0};             // microseconds helpers stay after this call
  // Written before the runs are, read only by those who drew a ticket.
  std::int64_t tickets = 0;
  const void* frame = nullptr;
  void (*run)(const void* frame, std::int64_t ticket) = nullptr;

  // The first ticket of a run, and the one after the last of the run before.
  std::int64_t begin_of(int number) const { return tickets * number / run_count(); }

  // Whether somebody may draw.
  bool has_left() const {
    for (int number = 0; number < run_count(); ++number) {
      if (runs[number].left.load() > 0) {
        return true;
      }
    }
    return false;
  }
};

constexpr int kBlocks = 64;
// Microseconds that a helper looks for more work before it leaves. Waking a thread takes 50, a
// product of a few rows as long: a helper that left at once would come too late each time. After
// calls of so few rows the next product is one of ours too; after others it may be XLA's, which
// wants the threads, and the helper stays no longer than it takes to begin the next call.
constexpr std::int64_t kPatience = 100, kShortPatience = 20;
constexpr std::int64_t kFewRows = 8;
// Looks at a counter before a thread that waits for it lets others run.
constexpr int kSpins = 2000;

struct Board {
  Block blocks[kBlocks];
  alignas(kLine) std::atomic<Block*> newest{nullptr};   // the block that was published last
  alignas(kLine) std::atomic<std::int64_t> present{0};  // helpers that run or are asked for
};

inline Board board;

// The run of a block that this thread begins with: the one of its last call, unless another thread
// has begun with that one now.
inline int first_run(Block* block) {
  static std::atomic<int> known{0};
  thread_local int own = known.fetch_add(1);
  for (int i = 0; i < run_count(); ++i) {
    const int number = (own + i) % run_count();
    if (!block->runs[number].begun.exchange(true)) {
      own = number;
      break;
    }
  }
  return own;
}

// Draw tickets of a run and do their tasks until none is left.
inline void work_on(Block* block, int number) {
  for (;;) {
    const std::int64_t left = block->runs[number].left.fetch_sub(1);
    if (left <= 0) {
      return;
    }
    block->run(block->frame, block->begin_of(number + 1) - left);
    block->done.fetch_add(1);
  }
}

// The same of all runs.
inline void work(Block* block) {
  const int first = first_run(block);
  for (int i = 0; i < run_count(); ++i) {
    work_on(block, (first + i) % run_count());
  }
}

// What XLA's pool runs for us: tasks of the newest call, as long as there are some and for a while
// longer.
inline void help() {
  using Clock = std::chrono::steady_clock;
  Clock::time_point leave = Clock::now();
  for (;;) {
    Block* block = board.newest.load();
    if (block->has_left()) {
      work(block);
      leave = Clock::now() + std::chrono::microseconds(block->patience.load());
    } else if (Clock::now() >= leave) {
      break;
    } else {
      pause();
    }
  }
  board.present.fetch_sub(1);
}

// A block nobody uses, or none.
inline Block* take_block() {
  for (Block& block : board.blocks) {
    if (!block.taken.exchange(true)) {
      return &block;
    }
  }
  return nullptr;
}

// task(0) to task(tickets - 1), in any order and on any threads; returns when all are done.
template <class Task>
void share(xla::ffi::ThreadPool& pool, std::int64_t tickets, std::int64_t rows, const Task& task) {
  const std::int64_t helpers = threads() - 1;
  Block* block = tickets > 1 && helpers > 0 ? take_block() : nullptr;
  if (block == nullptr) {
    for (std::int64_t ticket = 0; ticket < tickets; ++ticket) {
      task(ticket);
    }
    return;
  }
  block->tickets = tickets;
  block->frame = &task;
  block->run = [](const void* frame, std::int64_t ticket) {
    (*static_cast<const Task*>(frame))(ticket);
  };
  block->patience.store(rows <= kFewRows ? kPatience : kShortPatience);
  block->done.store(0);
  for (int number = 0; number < run_count(); ++number) {
    block->runs[number].begun.store(false);
  }
  for (int number = 0; number < run_count(); ++number) {  // publishes all of it
    block->runs[number].left.store(block->begin_of(number + 1) - block->begin_of(number));
  }
  board.newest.store(block);
  const std::int64_t wanted = helpers < tickets - 1 ? helpers : tickets - 1;
  const std::int64_t missing = wanted - board.present.load();
  if (missing > 0) {
    board.present.fetch_add(missing);
    for (std::int64_t i = 0; i < missing; ++i) {
      pool.Schedule([] { help(); });
    }
  }
  work(block);
  for (int spins = 0; block->done.load() < tickets; ++spins) {
    if (spins < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  block->taken.store(false);
}

// Memory of one thread, aligned for vectors, that grows to what a task asks for and is kept for the
// next.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { ::operator delete(memory_, std::align_val_t{kLine}); }

  // At least `floats` float32, which hold whatever was left there; valid until the next call on
  // this thread.
  float* of(std::int64_t floats) {
    if (floats > size_) {
      ::operator delete(memory_, std::align_val_t{kLine});
      memory_ = static_cast<float*>(::operator new(4 * floats, std::align_val_t{kLine}));
      std::memset(memory_, 0, 4 * floats);
      size_ = floats;
    }
    return memory_;
  }

  // For one task.
  static Scratch& mine() {
    thread_local Scratch scratch;
    return scratch;
  }

  // For what the tasks of a call read, written by the thread that calls.
  static Scratch& of_call() {
    thread_local Scratch scratch;
    return scratch;
  }

 private:
  float* memory_ = nullptr;
  std::int64_t size_ = 0;
};

// The matrix of four dimensions that a product takes: w itself, or, of many that lie one behind the
// other, w [X, ...], the one whose number is the argument behind all others, int32.
struct Chosen {
  std::array<Index, 4> dimensions;
  const void* data;  // nullptr: it is none of these
};

inline Chosen chosen(const xla::ffi::AnyBuffer& w, const xla::ffi::RemainingArgs& rest) {
  namespace ffi = xla::ffi;
  const auto all = w.dimensions();
  Chosen found{{}, nullptr};
  if (all.size() != 4 + rest.size() || rest.size() > 1) {
    return found;
  }
  std::copy(all.end() - 4, all.end(), found.dimensions.begin());
  if (rest.size() == 0) {
    found.data = w.untyped_data();
    return found;
  }
  const auto number = rest.get<ffi::BufferR0<ffi::DataType::S32>>(0);
  if (number.has_value() && number->typed_data()[0] >= 0 && number->typed_data()[0] < all[0]) {
    const std::size_t bytes = w.size_bytes() / all[0];
    found.data = static_cast<const char*>(w.untyped_data()) + number->typed_data()[0] * bytes;
  }
  return found;
}

inline xla::ffi::Error refused(const char* why) {
  return xla::ffi::Error(xla::ffi::ErrorCode::kInvalidArgument, why);
}

}  // namespace jitney

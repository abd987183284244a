// How long the calls of each part of a step have taken: a call looks at the clock when it begins
// and when it ends. The 240 calls of a small model's step take 12 us for it, of 8 ms.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace jitney {

// In the order of `jitney_part_names`.
enum class Part {
  kProducts,
  kHead,
  kDecodeAttention,
  kPromptAttention,
  kNorms,
  kRotation,
  kDeltaNets
};
constexpr int kParts = 7;

// Nanoseconds since the library was loaded.
inline std::atomic<std::int64_t> part_times[kParts];

inline void add_time(Part part, std::int64_t nanoseconds) {
  part_times[static_cast<int>(part)].fetch_add(nanoseconds, std::memory_order_relaxed);
}

// Nanoseconds since it was made.
class Watch {
 public:
  std::int64_t elapsed() const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begun_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begun_ = Clock::now();
};

// Gives a part the time of the scope that it stands in.
class Timed {
 public:
  explicit Timed(Part part) : part_(part) {}
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;
  ~Timed() { add_time(part_, watch_.elapsed()); }

 private:
  Part part_;
  Watch watch_;
};

}  // namespace jitney

// Waiting for a word of shared memory to change: a short polite spin, then sleep in the kernel until woken.
//
// The ranks of a host are often more than its cores, so a rank that waits gives its core away early: the one it waits for
// may need just that core.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SHARDWISE_LOOK_AROUND_SECONDS  // the tests give seconds: whoever is not woken then sleeps too long to go unnoticed
#define SHARDWISE_LOOK_AROUND_SECONDS 0.1
#endif

namespace shardwise {

constexpr int64_t kNanoseconds = 1000000000;
// How long a sleeper sleeps before it looks for dead peers.
constexpr int64_t kLookAround = static_cast<int64_t>(SHARDWISE_LOOK_AROUND_SECONDS * kNanoseconds);
constexpr int kSpins = 60;  // about 40 microseconds where nobody else wants the core

// Nanoseconds of a clock that all processes of the host share.
inline int64_t now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kNanoseconds + time.tv_nsec;
}

inline void pause_core() {
#if defined(__x86_64__)
  for (int i = 0; i < 8; ++i) __builtin_ia32_pause();
#elif defined(__aarch64__)
  for (int i = 0; i < 8; ++i) __asm__ __volatile__("yield");
#endif
}

inline long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr, 0);
}

// A word that some write and many wait for.
struct Signal {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;

  void wake() {
    if (sleepers.load(std::memory_order_seq_cst) != 0) futex(&value, FUTEX_WAKE, INT32_MAX, nullptr);
  }

  void set(uint32_t next) {
    value.store(next, std::memory_order_seq_cst);  // before `sleepers` is read: else a sleeper could be overlooked
    wake();
  }

  void add() {
    value.fetch_add(1, std::memory_order_seq_cst);
    wake();
  }

  // Returns as soon as the value differs from `old`, or after `kLookAround` at the latest.
  void wait(uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause_core();
      if (i % 4 == 3) sched_yield();
    }
    timespec patience{kLookAround / kNanoseconds, kLookAround % kNanoseconds};
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    futex(&value, FUTEX_WAIT, old, &patience);  // the kernel looks at the value once more
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

}  // namespace shardwise

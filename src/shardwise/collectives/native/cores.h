// Which core a rank works on. Ranks in lock step go as fast as the fullest core lets them: with four ranks on two cores,
// three on one of them take half as long again, and the kernel evens that out later than a large operation lasts.
#pragma once

#include <cstdint>
#include <cstdio>

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

namespace shardwise {

// The cores that the calling thread may use.
class Cores {
 public:
  Cores() {
    CPU_ZERO(&set_);
    if (sched_getaffinity(0, sizeof set_, &set_) != 0) CPU_ZERO(&set_);
  }

  int count() const { return CPU_COUNT(&set_); }

  // Equal for equal sets, and never 0.
  uint64_t word() const {
    uint64_t word = 0xcbf29ce484222325;  // FNV-1a
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set_)) word = (word ^ static_cast<uint64_t>(core)) * 0x100000001b3;
    }
    return word | 1;
  }

  // The `index`-th of them alone.
  Cores only(int index) const {
    Cores one = *this;
    for (int core = 0, seen = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set_) && seen++ != index) CPU_CLR(core, &one.set_);
    }
    return one;
  }

  // From now on the calling thread uses these. What the system refuses stays as it was.
  void use() const { sched_setaffinity(0, sizeof set_, &set_); }

 private:
  cpu_set_t set_;
};

// How many threads of this machine run or want to run now; a large number where the system does not say.
inline int runnable() {
  constexpr int kUnknown = 1 << 20;
  const int file = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
  if (file < 0) return kUnknown;
  char text[128] = {};
  const bool read_it = read(file, text, sizeof text - 1) > 0;
  close(file);
  int running = 0;
  return read_it && sscanf(text, "%*f %*f %*f %d/", &running) == 1 && running > 0 ? running : kUnknown;
}

// The one core that the calling thread keeps to, while it has one.
class Seat {
 public:
  bool taken() const { return taken_; }
  void take(const Cores& all, int index) {
    all_ = all;
    taken_ = true;
    all.only(index).use();
  }
  void leave() {
    if (taken_) all_.use();
    taken_ = false;
  }

 private:
  Cores all_;
  bool taken_ = false;
};

// Leaves the seat when an operation ends, however it does.
class Hold {
 public:
  explicit Hold(Seat& seat) : seat_(seat) {}
  ~Hold() { seat_.leave(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  Seat& seat_;
};

}  // namespace shardwise

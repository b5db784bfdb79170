// Rounds, the barrier between them, and the comparison of what the ranks were asked to do.
#include "group.h"

namespace shardwise {
namespace {

constexpr uint64_t kSeated = 512 << 10;  // bytes from which on moving to another core, some microseconds, is worth it
constexpr uint64_t kRoundsSeated = 32;   // between two looks at who else wants the cores

}  // namespace

void Group::begin(Call call, int64_t timeout) {
  room_.throw_if_broken();
  room_.resume();
  call.sequence = call_.sequence + 1;
  call_ = call;
  began_ = now();
  timeout_ = timeout;
  Member& own = room_.member(room_.rank);
  own.calls[call.sequence % 2] = call;  // read by others after the barrier
  own.announced.store(call.sequence, std::memory_order_release);
}

// Deals the cores out to the ranks that share them all, where there are more ranks than cores (else the kernel finds an idle
// core for each by itself) and nobody else wants to run.
Hold Group::take_seat() {
  if (call_.count * call_.item < kSeated) return Hold(seat_);
  const Cores cores;
  const uint64_t word = cores.word();
  int before = 0, sharing = 0;
  for (int peer = 0; peer < room_.size; ++peer) {
    const Member& member = room_.member(peer);
    if (member.state.load(std::memory_order_acquire) != 1 || member.cores != word) continue;
    before += peer < room_.rank;
    ++sharing;
  }
  if (cores.count() > 1 && sharing > cores.count() && runnable() <= room_.size) seat_.take(cores, before % cores.count());
  return Hold(seat_);
}

// The barrier. Nobody can arrive at the next one before all have left this one's predecessor, so one counter serves all.
void Group::meet() {
  Header& header = room_.header();
  Member& own = room_.member(room_.rank);
  const uint64_t round = ++round_;
  if (seat_.taken() && round % kRoundsSeated == 0 && runnable() > room_.size) seat_.leave();
  own.heard.store(now(), std::memory_order_relaxed);
  own.rounds.store(round, std::memory_order_release);
  const uint64_t arrived = header.arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (arrived == round * room_.size) {
    header.generation.set(static_cast<uint32_t>(round));
  } else {
    wait_for(static_cast<uint32_t>(round));
  }
}

void Group::wait_for(uint32_t generation) {
  Signal& signal = room_.header().generation;
  int64_t looked = now();
  for (uint32_t seen; (seen = signal.value.load(std::memory_order_acquire)) != generation;) {
    if (room_.header().broken.load(std::memory_order_acquire) != 0) room_.throw_if_broken();
    signal.wait(seen);
    const int64_t time = now();
    if (time - looked < kLookAround) continue;
    looked = time;
    if (signal.value.load(std::memory_order_acquire) == generation) break;
    look_around();
  }
}

bool Group::is_missing(int peer) const { return room_.member(peer).rounds.load(std::memory_order_acquire) < round_; }

void Group::look_around() {
  room_.throw_if_broken();
  for (int peer = 0; peer < room_.size; ++peer) {
    if (!is_missing(peer)) continue;
    const std::string gone = room_.gone(peer);
    if (!gone.empty() && is_missing(peer)) room_.fail(gone + "; " + describe(call_) + " waits for it");
  }
  if (now() - began_ > timeout_) give_up();
}

// "Timed out" are the words by which programs tell a timeout, with Gloo too.
void Group::give_up() {
  room_.fail("Timed out waiting: " + describe(call_) + " timed out after " + seconds_since(began_) + ": missing " + missing());
}

std::string Group::missing() const {
  std::string text;
  for (int peer = 0; peer < room_.size; ++peer) {
    if (!is_missing(peer)) continue;
    const Member& member = room_.member(peer);
    const int64_t heard = member.heard.load(std::memory_order_relaxed);
    text += (text.empty() ? "" : "; ") + last_seen(room_.called(peer), last_call(member), heard);
  }
  return text;
}

const Call& Group::last_call(const Member& member) {
  return member.calls[0].sequence > member.calls[1].sequence ? member.calls[0] : member.calls[1];
}

std::string Group::last_seen(const std::string& called, const Call& last, int64_t heard) {
  return "rank " + called + " (last call " + describe(last) + ", heard of " + seconds_since(heard) + " ago)";
}

bool differs(const Call& a, const Call& b) {
  return a.sequence != b.sequence || a.kind != b.kind || a.reduce != b.reduce || a.dtype != b.dtype || a.root != b.root ||
         a.label.digest != b.label.digest || (a.count != b.count && a.kind != Kind::all_to_all);
}

std::string difference(const std::vector<std::string>& called, const std::vector<Call>& calls) {
  bool out_of_step = false;
  std::vector<std::string> ranks;  // of each call that is unlike those before
  std::vector<Call> unlike;
  for (size_t i = 0; i < calls.size(); ++i) {
    out_of_step = out_of_step || calls[i].label.digest != calls[0].label.digest;
    size_t k = 0;
    while (k < unlike.size() && differs(unlike[k], calls[i])) ++k;
    if (k == unlike.size()) unlike.push_back(calls[i]), ranks.push_back("");
    ranks[k] += (ranks[k].empty() ? "" : ", ") + called[i];
  }
  std::string text = out_of_step ? kOutOfStep : "the ranks called different collectives";
  for (size_t k = 0; k < unlike.size(); ++k) {
    const bool one = ranks[k].find(',') == std::string::npos;
    text += (k ? "; " : ": ") + std::string(one ? "rank " : "ranks ") + ranks[k] + ": " + describe(unlike[k]);
  }
  return text;
}

// All ranks compare the same calls, so all come to the same end.
void Group::compare() {
  const uint64_t parity = call_.sequence % 2;
  const Call& first = room_.member(0).calls[parity];
  bool equal = true;
  for (int peer = 1; peer < room_.size; ++peer) equal = equal && !differs(first, room_.member(peer).calls[parity]);
  if (equal) return;
  std::vector<std::string> called;
  std::vector<Call> calls;
  for (int peer = 0; peer < room_.size; ++peer) {
    called.push_back(room_.called(peer));
    calls.push_back(room_.member(peer).calls[parity]);
  }
  room_.fail(difference(called, calls));
}

// Of all-to-all: what one rank sends the other has to expect. `most` becomes the largest piece of all.
void Group::compare_sizes(uint64_t& most) {
  const uint64_t parity = call_.sequence % 2;
  most = 0;
  for (int from = 0; from < room_.size; ++from) {
    for (int to = 0; to < room_.size; ++to) {
      const uint64_t sent = room_.sizes(from, parity)[to], expected = room_.sizes(to, parity)[room_.size + from];
      most = std::max(most, sent);
      if (sent == expected) continue;
      room_.fail(describe(call_) + ": rank " + room_.called(from) + " sends " + std::to_string(sent) + " bytes to rank " +
                 room_.called(to) + ", which expects " + std::to_string(expected));
    }
  }
}

}  // namespace shardwise

// Hearing of peers and telling them: heartbeats, failures, farewells.
#include "wire_words.h"

#include <algorithm>
#include <cstring>

namespace shardwise {
namespace {

constexpr uint64_t kWordsWaiting = 64 << 10;

bool is_readable(const Call& call) {
  return call.kind <= Kind::receive && call.reduce <= Reduce::none && call.number <= Number::other;
}

}  // namespace

void Wire::beat() {
  for (const auto& each : links_) {
    std::lock_guard<std::mutex> lock(each->mutex);
    if (each->sockets[watch] >= 0 && each->state.load() == there) say(*each, heartbeat, "");
  }
}

void Wire::announce(const Call& call) {
  std::lock_guard<std::mutex> lock(call_mutex_);
  call_ = call;
}

void Wire::tell(const std::string& reason) {
  if (told_.exchange(true)) return;
  const std::string prefix = "shardwise engine: ";  // which the hearer puts there again
  const std::string text = reason.compare(0, prefix.size(), prefix) == 0 ? reason.substr(prefix.size()) : reason;
  for (const auto& each : links_) {
    std::lock_guard<std::mutex> lock(each->mutex);
    if (each->sockets[watch] >= 0 && each->state.load() == there) say(*each, failure, text);
  }
}

void Wire::tell_failure(const std::string& text) {
  for (const auto& each : links_) {
    std::lock_guard<std::mutex> lock(each->mutex);
    if (each->sockets[watch] >= 0 && each->state.load() == there) say(*each, own_failure, text);
  }
}

// The socket of a peer that does not read takes no more at some time: heartbeats then are left out.
void Wire::say(Link& link, uint32_t kind, const std::string& text) {
  if (link.words_out.size() < kWordsWaiting) {
    Word word{};
    word.kind = kind, word.length = static_cast<uint32_t>(std::min<size_t>(text.size(), kTextMost - 1));
    {
      std::lock_guard<std::mutex> lock(call_mutex_);
      word.call = call_;
    }
    link.words_out.append(reinterpret_cast<const char*>(&word), sizeof word).append(text, 0, word.length);
  }
  uint64_t count = 0;
  int error = 0;
  while (!link.words_out.empty()) {
    if (put(link.sockets[watch], link.words_out.data(), link.words_out.size(), count, error) != Moved::some) return;
    link.words_out.erase(0, count);
  }
}

void Wire::hear(int peer) {
  Link& each = link(peer);
  std::string broken;
  bool lost = false;
  {
    std::lock_guard<std::mutex> lock(each.mutex);
    if (each.sockets[watch] < 0) return;
    char buffer[4096];
    uint64_t count = 0;
    int error = 0;
    Moved moved;
    while ((moved = take(each.sockets[watch], buffer, sizeof buffer, count, error)) == Moved::some) {
      each.words_in.insert(each.words_in.end(), buffer, buffer + count);
      heed(peer, broken);
    }
    lost = moved == Moved::ended;
    if (lost) lose(each, peer, error);
  }
  if (!broken.empty()) {
    try {
      room_.fail(broken);
    } catch (const Failure&) {  // which whoever waits raises
    }
  }
  if (lost || !broken.empty()) {
    moved_.add();
    bell_->add();
  }
}

// Reads the whole words that have come.
void Wire::heed(int peer, std::string& broken) {
  Link& each = link(peer);
  size_t at = 0;
  Word word{};
  while (each.words_in.size() - at >= sizeof word) {
    std::memcpy(&word, each.words_in.data() + at, sizeof word);
    if (word.kind > own_failure || word.length >= kTextMost || !is_readable(word.call)) {
      broken = who_[peer] + " sent what is no heartbeat";
      break;
    }
    if (each.words_in.size() - at < sizeof word + word.length) break;
    end_text(word.call);
    each.last = word.call, each.heard = now();
    if (word.kind == own_failure) {
      each.failure.assign(each.words_in.data() + at + sizeof word, word.length);
      each.failed_at = word.call.sequence;
      ++each.failures;
    }
    if (word.kind == farewell) each.state.store(left);
    if (word.kind == failure && broken.empty()) broken.assign(each.words_in.data() + at + sizeof word, word.length);
    at += sizeof word + word.length;
  }
  each.words_in.erase(each.words_in.begin(), each.words_in.begin() + static_cast<std::ptrdiff_t>(at));
}

// The end of the watch connection is the end of the peer. What it sent before is still read from the others.
void Wire::lose(Link& link, int peer, int error) {
  uint32_t was = there;
  const bool silent = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN;
  link.state.compare_exchange_strong(was, silent ? unreachable : died);
  close_lane(link, watch);
  if (silent) {
    link.data_closed.store(true, std::memory_order_release);
    close_lane(link, mail);
  }
  arm(link, peer, data, link.armed[data]);
}

std::string Wire::gone(int peer) const {
  switch (link(peer).state.load(std::memory_order_acquire)) {
    case there: return "";
    case left: return who_[peer] + " has left the group";
    case died: return who_[peer] + " has died";
    default: return who_[peer] + " cannot be reached any more";
  }
}

bool Wire::has_left(int peer) const {
  return link(peer).state.load(std::memory_order_acquire) == left && failed(peer, ~0ull).empty();
}

std::string Wire::failed(int peer, uint64_t sequence) const {
  const Link& each = link(peer);
  std::lock_guard<std::mutex> lock(each.mutex);
  const bool alone = each.failures > room_.member(room_.rank).failures.load(std::memory_order_relaxed);
  return alone && each.failed_at < sequence && each.last.sequence == each.failed_at ? who_[peer] + " has failed: " + each.failure : "";
}

std::string Wire::silent(int peer) const {
  const std::string failure = failed(peer, ~0ull);
  if (!failure.empty()) return failure;
  return link(peer).mail_closed.load(std::memory_order_acquire) ? gone(peer) : "";
}

Call Wire::last_call(int peer, int64_t& heard) const {
  Link& each = link(peer);
  std::lock_guard<std::mutex> lock(each.mutex);
  heard = each.heard;
  return each.last;
}

}  // namespace shardwise

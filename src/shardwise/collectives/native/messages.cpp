// Frames in, frames out. Everything but `run` and `hand_over` is called with the mutex held.
#include "messages.h"

#include <algorithm>
#include <cstring>

#include "turns.h"

namespace shardwise {

Messenger::Messenger(Peers peers) : group_(std::move(peers)), peers_(group_.size) {}

Messenger::~Messenger() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    fail_all(std::make_exception_ptr(Failure("shardwise engine: the group was destroyed while messages were under way")));
    hand_over(lock);
  }
  work_.notify_all();
  group_.bell().add();
  if (thread_.joinable()) thread_.join();
}

void Messenger::send(int peer, int tag, int32_t dtype, const void* data, uint64_t bytes, int64_t timeout, Done done) {
  char* source = const_cast<char*>(static_cast<const char*>(data));  // only read
  submit({Kind::send, peer, tag, dtype, source, bytes, 0, now(), timeout, std::move(done)});
}

void Messenger::receive(int peer, int tag, int32_t dtype, void* data, uint64_t bytes, int64_t timeout, Done done) {
  submit({Kind::receive, peer, tag, dtype, static_cast<char*>(data), bytes, 0, now(), timeout, std::move(done)});
}

void Messenger::submit(Transfer transfer) {
  group_.throw_if_broken();
  group_.resume();
  std::unique_lock<std::mutex> lock(mutex_);
  auto& queue = transfer.kind == Kind::send ? peers_[transfer.peer].outgoing : incoming_;
  queue.push_back(std::move(transfer));
  progress();
  const bool rest = pending();
  if (rest && !thread_.joinable()) thread_ = std::thread([this] { run(); });
  hand_over(lock);
  if (!rest) return;
  work_.notify_all();
  group_.bell().add();
}

void Messenger::run() {
  on_engine_thread = true;
  Signal& bell = group_.bell();
  int64_t looked = now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_) {
    if (!pending()) {
      work_.wait(lock, [&] { return closing_ || pending(); });
      looked = now();
      continue;
    }
    const uint32_t seen = bell.value.load(std::memory_order_acquire);
    const bool look = now() - looked >= kLookAround;
    std::vector<std::string> gone(look ? group_.size : 0);
    for (size_t peer = 0; peer < gone.size(); ++peer) gone[peer] = group_.gone(static_cast<int>(peer));
    progress();  // after that: what a rank sent before it went is not lost
    if (look) {
      looked = now();
      look_around(gone);
    }
    const bool rest = pending();
    hand_over(lock);
    if (rest) bell.wait(seen);
    lock.lock();
  }
}

// Calls back outside of the lock, which it leaves open.
void Messenger::hand_over(std::unique_lock<std::mutex>& lock) {
  std::deque<Finished> finished;
  finished.swap(finished_);
  lock.unlock();
  for (Finished& each : finished) each.done(each.error, each.source);
}

void Messenger::progress() {
  try {
    for (int peer = 0; peer < group_.size; ++peer) {
      if (!peers_[peer].outgoing.empty()) push(peer);
      if (!incoming_.empty()) deliver_kept(peer);
      if (wanted(peer)) pull(peer);
    }
  } catch (const std::exception& error) {
    fail_all_by(error);
  }
}

void Messenger::push(int to) {
  Ring& ring = group_.to(to);
  std::list<Transfer>& queue = peers_[to].outgoing;
  uint64_t written = ring.written.load(std::memory_order_relaxed);
  bool any = false;
  while (!queue.empty() && written - ring.read.load(std::memory_order_acquire) < kFrames) {
    Transfer& transfer = queue.front();
    Frame& frame = ring.frames[written % kFrames];
    frame.tag = transfer.tag, frame.dtype = transfer.dtype, frame.total = transfer.bytes, frame.offset = transfer.moved;
    frame.length = std::min(kFrameBytes, transfer.bytes - transfer.moved);
    if (frame.length) std::memcpy(frame.data, transfer.data + transfer.moved, frame.length);
    transfer.moved += frame.length;
    ring.written.store(++written, std::memory_order_release);
    any = true;
    if (transfer.moved < transfer.bytes) continue;
    finish(transfer, group_.rank);
    queue.pop_front();
  }
  if (any) group_.notify(to);
}

void Messenger::pull(int from) {
  Ring& ring = group_.from(from);
  uint64_t read = ring.read.load(std::memory_order_relaxed);
  bool any = false;
  while (read != ring.written.load(std::memory_order_acquire)) {
    const Frame& frame = ring.frames[read % kFrames];
    if (peers_[from].arriving.empty() && frame.offset == 0 && !start(from, frame)) break;
    check_continues(from, frame);
    Arrival& arrival = peers_[from].arriving.front();
    char* to = arrival.receiver.empty() ? arrival.aside.data() : arrival.receiver.front().data;
    if (frame.length) std::memcpy(to + frame.offset, frame.data, frame.length);
    arrival.came += frame.length;
    const bool whole = arrival.came == arrival.total;
    ring.read.store(++read, std::memory_order_release);
    any = true;
    if (whole) finish_arrival(from);
  }
  if (any) group_.notify(from);
}

// False where nobody waits for anything of this sender: the message stays in the ring, and its sender waits.
bool Messenger::start(int from, const Frame& frame) {
  if (!wanted(from)) return false;
  Arrival arrival{frame.tag, frame.dtype, frame.total, take_receiver(from, frame.tag), {}};
  if (arrival.receiver.empty()) {
    arrival.aside.resize(frame.total);
  } else {
    check_size(arrival.receiver.front(), from, frame.dtype, frame.total);
  }
  peers_[from].arriving.push_back(std::move(arrival));
  return true;
}

// A frame says where its bytes go, and was made by another process, maybe on another host.
void Messenger::check_continues(int from, const Frame& frame) const {
  const std::list<Arrival>& arriving = peers_[from].arriving;
  const auto is_next = [&](const Arrival& arrival) {
    const bool is_same = arrival.tag == frame.tag && arrival.dtype == frame.dtype && arrival.total == frame.total;
    return is_same && arrival.came == frame.offset;
  };
  if (!arriving.empty() && is_next(arriving.front())) return;
  group_.fail("rank " + group_.called(from) + " sent a piece of a message that it had not begun");
}

void Messenger::finish_arrival(int from) {
  Peer& peer = peers_[from];
  if (peer.arriving.front().receiver.empty()) {
    peer.kept.splice(peer.kept.end(), peer.arriving);
    deliver_kept(from);
  } else {
    finish(peer.arriving.front().receiver.front(), from);
    peer.arriving.clear();
  }
}

void Messenger::deliver_kept(int from) {
  auto& kept = peers_[from].kept;
  for (auto message = kept.begin(); message != kept.end();) {
    std::list<Transfer> receiver = take_receiver(from, message->tag);
    if (receiver.empty()) {
      ++message;
      continue;
    }
    Transfer& transfer = receiver.front();
    check_size(transfer, from, message->dtype, message->total);
    if (message->total) std::memcpy(transfer.data, message->aside.data(), message->total);
    finish(transfer, from);
    message = kept.erase(message);
  }
}

std::list<Messenger::Transfer> Messenger::take_receiver(int from, int tag) {
  std::list<Transfer> taken;
  const auto fits = [&](const Transfer& t) { return (t.peer == from || t.peer < 0) && t.tag == tag; };
  const auto found = std::find_if(incoming_.begin(), incoming_.end(), fits);
  if (found != incoming_.end()) taken.splice(taken.end(), incoming_, found);
  return taken;
}

bool Messenger::wanted(int from) const {
  if (!peers_[from].arriving.empty()) return true;
  return std::any_of(incoming_.begin(), incoming_.end(), [&](const Transfer& t) { return t.peer == from || t.peer < 0; });
}

bool Messenger::pending() const {
  return !incoming_.empty() || std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return !peer.outgoing.empty() || !peer.arriving.empty();
  });
}

void Messenger::check_size(const Transfer& transfer, int from, int32_t dtype, uint64_t total) {
  if (transfer.bytes == total && transfer.dtype == dtype) return;
  const std::string what = transfer.bytes == total ? "other dtype" : "size: " + std::to_string(total) + " bytes";
  const std::string text = describe(transfer) + " met a message of rank " + group_.called(from) + " of an" +
                           (transfer.bytes == total ? " " + what : "other " + what);
  finished_.push_back({transfer.done, std::make_exception_ptr(Failure("shardwise engine: " + text)), from});
  group_.fail(text);
}

void Messenger::finish(Transfer& transfer, int source) { finished_.push_back({transfer.done, nullptr, source}); }

void Messenger::look_around(const std::vector<std::string>& gone) {
  try {
    group_.throw_if_broken();
    for (const Transfer& transfer : incoming_) look_at(transfer, gone);
    for (const Peer& peer : peers_) {
      for (const Transfer& transfer : peer.outgoing) look_at(transfer, gone);
      for (const Arrival& arrival : peer.arriving) {
        for (const Transfer& transfer : arrival.receiver) look_at(transfer, gone);
      }
    }
  } catch (const std::exception& error) {
    fail_all_by(error);
  }
}

// A rank that has left as it should sends nothing more: of a message of any rank, another one may be the sender.
void Messenger::look_at(const Transfer& transfer, const std::vector<std::string>& gone) {
  const auto is_there = [&](int peer) { return peer != group_.rank && gone[peer].empty(); };
  bool others = false;
  for (int peer = 0; peer < group_.size; ++peer) others = others || is_there(peer);
  for (int peer = 0; peer < group_.size; ++peer) {
    const bool awaited = peer != group_.rank && (transfer.peer == peer || (transfer.peer < 0 && !(others && group_.left(peer))));
    if (awaited && !gone[peer].empty()) group_.fail(gone[peer] + "; " + describe(transfer) + " waits for it");
  }
  if (now() - transfer.began > transfer.timeout) {
    group_.fail("Timed out waiting: " + describe(transfer) + " timed out after " + seconds_since(transfer.began));
  }
}

void Messenger::fail_all(std::exception_ptr error) {
  const auto fail = [&](std::list<Transfer>& transfers) {
    for (Transfer& transfer : transfers) finished_.push_back({std::move(transfer.done), error, -1});
    transfers.clear();
  };
  fail(incoming_);
  for (Peer& peer : peers_) {
    fail(peer.outgoing);
    for (Arrival& arrival : peer.arriving) fail(arrival.receiver);
    peer.arriving.clear();
    peer.kept.clear();
  }
}

// Of an error that is none of the engine's own, no memory for what is kept aside say, the group hears first.
void Messenger::fail_all_by(const std::exception& error) {
  try {
    if (dynamic_cast<const Failure*>(&error) != nullptr) throw;
    group_.fail("rank " + group_.called(group_.rank) + " could not move messages: " + error.what());
  } catch (const Failure&) {
    fail_all(std::current_exception());
  }
}

std::string Messenger::describe(const Transfer& transfer) const {
  const std::string peer = transfer.peer < 0 ? "any rank" : "rank " + group_.called(transfer.peer);
  return std::string(name(transfer.kind)) + " of " + std::to_string(transfer.bytes) + " bytes (tag " +
         std::to_string(transfer.tag) + ") " + (transfer.kind == Kind::send ? "to " : "from ") + peer;
}

}  // namespace shardwise

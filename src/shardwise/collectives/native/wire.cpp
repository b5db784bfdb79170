// Moving bytes, hearing of peers, and telling them. A link's mutex is held for every call on its sockets, so `forget` and
// `leave` know that nobody is within one.
#include "wire.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

namespace shardwise {
namespace {

constexpr uint64_t kTurn = 1 << 20;  // bytes that one connection moves before another one has its turn
constexpr uint64_t kWordsWaiting = 64 << 10;
constexpr uint64_t kFrameHead = offsetof(Frame, data);
constexpr uint64_t kOwnKey = ~0ull;
constexpr int64_t kFarewell = 5 * kNanoseconds;

enum WordKind : uint32_t { heartbeat, failure, farewell };

// What goes over the watch connection; `length` bytes of text follow.
struct Word {
  uint32_t kind, length;
  Call call;
};
constexpr uint32_t kTextMost = sizeof(Header::reason);

enum class Moved { nothing, some, ended };

// One non-blocking call. `count` becomes what was moved.
template <class Call>
Moved move(uint64_t& count, int& error, Call call) {
  while (true) {
    const ssize_t done = call();
    count = done > 0 ? static_cast<uint64_t>(done) : 0;
    if (done > 0) return Moved::some;
    error = done == 0 ? 0 : errno;
    if (done < 0 && error == EINTR) continue;
    return done < 0 && (error == EAGAIN || error == EWOULDBLOCK) ? Moved::nothing : Moved::ended;
  }
}

Moved put(int socket, const void* bytes, uint64_t most, uint64_t& count, int& error) {
  return move(count, error, [&] { return ::send(socket, bytes, most, MSG_NOSIGNAL | MSG_DONTWAIT); });
}

Moved take(int socket, void* bytes, uint64_t most, uint64_t& count, int& error) {
  return move(count, error, [&] { return ::recv(socket, bytes, most, MSG_DONTWAIT); });
}

void set(int socket, int level, int option, int value) { setsockopt(socket, level, option, &value, sizeof value); }

bool is_readable(const Call& call) {
  return call.kind <= Kind::receive && call.reduce <= Reduce::none && call.number <= Number::other;
}

}  // namespace

Wire::Wire(Room& room, const std::vector<Sockets>& sockets, std::vector<int> names, std::vector<std::string> who)
    : room_(room), names_(std::move(names)), who_(std::move(who)), bell_(&room.member(room.rank).bell) {
  poll_ = epoll_create1(EPOLL_CLOEXEC);
  waker_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN, event.data.u64 = kOwnKey;
  epoll_ctl(poll_, EPOLL_CTL_ADD, waker_, &event);
  for (size_t peer = 0; peer < sockets.size(); ++peer) {
    links_.push_back(std::make_unique<Link>());
    Link& link = *links_.back();
    link.sockets = sockets[peer];
    if (link.sockets[data] < 0) continue;
    link.heard = now();
    link.outbox.reset(new Ring());
    link.inbox.reset(new Ring());
    set(link.sockets[watch], IPPROTO_TCP, TCP_USER_TIMEOUT, kSilenceMilliseconds);
    for (const Lane lane : {watch, data, mail}) {
      set(link.sockets[lane], IPPROTO_TCP, TCP_NODELAY, 1);
      arm(link, static_cast<int>(peer), lane, lane == data ? 0u : static_cast<uint32_t>(EPOLLIN));
    }
  }
  thread_ = std::thread([this] { run(); });
}

Wire::~Wire() {
  finish_mail();
  stopping_.store(true);
  const uint64_t one = 1;
  if (write(waker_, &one, sizeof one) < 0) {}  // the thread looks by itself at the next heartbeat
  thread_.join();
  leave();
  close(poll_);
  close(waker_);
}

// A message counts as sent when it is in the outbox, so that is emptied first, as long as somebody takes it.
void Wire::finish_mail() {
  const int64_t began = now();
  const auto waits = [](const std::unique_ptr<Link>& each) {
    return each->outbox && !each->mail_closed.load() && each->outbox->read.load() != each->outbox->written.load();
  };
  while (std::any_of(links_.begin(), links_.end(), waits) && room_.header().broken.load() == 0 && now() - began < kFarewell) {
    const timespec moment{0, 1000000};
    nanosleep(&moment, nullptr);
  }
}

// Says goodbye and closes. What peers sent and nobody read goes with it.
void Wire::leave() {
  for (const auto& each : links_) {
    std::lock_guard<std::mutex> lock(each->mutex);
    if (each->sockets[watch] >= 0 && each->state.load() == there) say(*each, farewell, "");
    for (const Lane lane : {mail, data, watch}) close_lane(*each, lane);
  }
}

void Wire::run() {
  epoll_event events[64];
  int64_t beaten = 0;
  while (!stopping_.load()) {
    const int64_t rest = beaten + kBeat - now();
    const int count = epoll_wait(poll_, events, 64, rest > 0 ? static_cast<int>(rest / 1000000) + 1 : 0);
    for (int i = 0; i < count; ++i) {
      const uint64_t key = events[i].data.u64;
      if (key != kOwnKey) serve(static_cast<int>(key / kLanes), static_cast<Lane>(key % kLanes));
    }
    if (now() - beaten < kBeat) continue;
    beaten = now();
    beat();
  }
}

void Wire::beat() {
  for (const auto& each : links_) {
    std::lock_guard<std::mutex> lock(each->mutex);
    if (each->sockets[watch] >= 0 && each->state.load() == there) say(*each, heartbeat, "");
  }
}

void Wire::serve(int peer, Lane lane) {
  if (lane == watch) return hear(peer);
  Link& each = link(peer);
  bool news = false;
  {
    std::lock_guard<std::mutex> lock(each.mutex);
    if (each.sockets[lane] < 0) return;
    if (lane == data) {
      news = push_data(each) | pull_data(each);
      arm(each, peer, data, (each.in.empty() ? 0u : EPOLLIN) | (each.out.empty() ? 0u : EPOLLOUT));
    }
  }
  if (lane == mail) return stir(peer);
  if (news) moved_.add();
}

// A socket that nobody waits for is not polled at all: else one that was closed would be reported without end.
void Wire::arm(Link& link, int peer, Lane lane, uint32_t events) {
  if (lane == data && link.data_closed.load()) events = 0;
  if (link.sockets[lane] < 0 || link.armed[lane] == events) return;
  epoll_event event{};
  event.events = events, event.data.u64 = static_cast<uint64_t>(peer) * kLanes + lane;
  const int change = events == 0 ? EPOLL_CTL_DEL : link.armed[lane] == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  epoll_ctl(poll_, change, link.sockets[lane], &event);
  link.armed[lane] = events;
}

uint64_t Wire::send(int peer, const void* bytes, uint64_t count) {
  Link& each = link(peer);
  std::lock_guard<std::mutex> lock(each.mutex);
  if (count == 0) return each.posted_out;
  each.out.push_back({const_cast<char*>(static_cast<const char*>(bytes)), count});  // only read
  each.posted_out += count;
  if (each.out.size() == 1) push_data(each);
  arm(each, peer, data, (each.in.empty() ? 0u : EPOLLIN) | (each.out.empty() ? 0u : EPOLLOUT));
  return each.posted_out;
}

uint64_t Wire::receive(int peer, void* bytes, uint64_t count) {
  Link& each = link(peer);
  std::lock_guard<std::mutex> lock(each.mutex);
  if (count == 0) return each.posted_in;
  each.in.push_back({static_cast<char*>(bytes), count});
  each.posted_in += count;
  if (each.in.size() == 1) pull_data(each);
  arm(each, peer, data, (each.in.empty() ? 0u : EPOLLIN) | (each.out.empty() ? 0u : EPOLLOUT));
  return each.posted_in;
}

// True where something posted is through, or nothing ever will be.
bool Wire::push_data(Link& link) {
  bool done = false;
  for (uint64_t total = 0; !link.out.empty() && total < kTurn && !link.data_closed.load();) {
    Span& span = link.out.front();
    uint64_t count = 0;
    int error = 0;
    const Moved moved = put(link.sockets[data], span.bytes, std::min(span.count, kTurn), count, error);
    if (moved == Moved::ended) {
      link.data_closed.store(true, std::memory_order_release);
      return true;
    }
    if (moved == Moved::nothing) break;
    span.bytes += count, span.count -= count, total += count;
    link.sent.fetch_add(count, std::memory_order_release);
    if (span.count != 0) continue;
    link.out.pop_front();
    done = true;
  }
  return done;
}

bool Wire::pull_data(Link& link) {
  bool done = false;
  for (uint64_t total = 0; !link.in.empty() && total < kTurn && link.sockets[data] >= 0;) {
    Span& span = link.in.front();
    uint64_t count = 0;
    int error = 0;
    const Moved moved = take(link.sockets[data], span.bytes, std::min(span.count, kTurn), count, error);
    if (moved == Moved::ended) {
      link.data_closed.store(true, std::memory_order_release);
      return true;
    }
    if (moved == Moved::nothing) break;
    span.bytes += count, span.count -= count, total += count;
    link.received.fetch_add(count, std::memory_order_release);
    if (span.count != 0) continue;
    link.in.pop_front();
    done = true;
  }
  return done;
}

void Wire::forget() {
  for (const auto& each : links_) {
    std::lock_guard<std::mutex> lock(each->mutex);
    each->out.clear();
    each->in.clear();
  }
}

void Wire::stir(int peer) {
  Link& each = link(peer);
  bool ring = false;
  {
    std::lock_guard<std::mutex> lock(each.mutex);
    if (each.sockets[mail] < 0) return;
    const uint64_t read = each.outbox->read.load(std::memory_order_acquire);
    push_mail(each);
    ring = pull_mail(each) || each.outbox->read.load(std::memory_order_acquire) != read;
    if (each.sockets[mail] < 0) return;
    const bool full = each.inbox->written.load() - each.inbox->read.load(std::memory_order_acquire) >= kFrames;
    const bool more = each.outbox->read.load() != each.outbox->written.load(std::memory_order_acquire);
    arm(each, peer, mail, (full ? 0u : EPOLLIN) | (more ? EPOLLOUT : 0u));
  }
  if (ring) bell_->add();
}

void Wire::push_mail(Link& link) {
  Ring& ring = *link.outbox;
  uint64_t read = ring.read.load(std::memory_order_relaxed);
  while (link.sockets[mail] >= 0 && read != ring.written.load(std::memory_order_acquire)) {
    const Frame& frame = ring.frames[read % kFrames];
    const uint64_t whole = kFrameHead + frame.length;
    uint64_t count = 0;
    int error = 0;
    const char* from = reinterpret_cast<const char*>(&frame) + link.frame_out;
    const Moved moved = put(link.sockets[mail], from, whole - link.frame_out, count, error);
    if (moved == Moved::ended) return close_lane(link, mail);
    if (moved == Moved::nothing) return;
    link.frame_out += count;
    if (link.frame_out < whole) continue;
    link.frame_out = 0;
    ring.read.store(++read, std::memory_order_release);
  }
}

bool Wire::pull_mail(Link& link) {
  Ring& ring = *link.inbox;
  uint64_t written = ring.written.load(std::memory_order_relaxed);
  bool any = false;
  while (link.sockets[mail] >= 0 && written - ring.read.load(std::memory_order_acquire) < kFrames) {
    Frame& frame = ring.frames[written % kFrames];
    const uint64_t whole = link.frame_in < kFrameHead ? kFrameHead : kFrameHead + frame.length;
    uint64_t count = 0;
    int error = 0;
    char* to = reinterpret_cast<char*>(&frame) + link.frame_in;
    const Moved moved = take(link.sockets[mail], to, whole - link.frame_in, count, error);
    if (moved == Moved::nothing) return any;
    link.frame_in += count;
    if (moved == Moved::ended || (link.frame_in == kFrameHead && !accept_frame(link))) {
      close_lane(link, mail);
      return true;
    }
    if (link.frame_in < kFrameHead || link.frame_in < kFrameHead + frame.length) continue;
    link.frame_in = 0;
    ring.written.store(++written, std::memory_order_release);
    any = true;
  }
  return any;
}

// Sizes are looked at before a byte is written anywhere by them.
bool Wire::accept_frame(const Link& link) const {
  const Frame& frame = link.inbox->frames[link.inbox->written.load() % kFrames];
  return frame.length <= kFrameBytes && frame.offset <= frame.total && frame.length <= frame.total - frame.offset;
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
    if (word.kind > farewell || word.length >= kTextMost || !is_readable(word.call)) {
      broken = who_[peer] + " sent what is no heartbeat";
      break;
    }
    if (each.words_in.size() - at < sizeof word + word.length) break;
    each.last = word.call, each.heard = now();
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

void Wire::close_lane(Link& link, Lane lane) {
  if (link.sockets[lane] < 0) return;
  ::shutdown(link.sockets[lane], SHUT_WR);  // what is under way still arrives
  close(link.sockets[lane]);
  link.sockets[lane] = -1;
  if (lane == mail) link.mail_closed.store(true, std::memory_order_release);
}

std::string Wire::gone(int peer) const {
  switch (link(peer).state.load(std::memory_order_acquire)) {
    case there: return "";
    case left: return who_[peer] + " has left the group";
    case died: return who_[peer] + " has died";
    default: return who_[peer] + " cannot be reached any more";
  }
}

std::string Wire::silent(int peer) const {
  return link(peer).mail_closed.load(std::memory_order_acquire) ? gone(peer) : "";
}

Call Wire::last_call(int peer, int64_t& heard) const {
  Link& each = link(peer);
  std::lock_guard<std::mutex> lock(each.mutex);
  heard = each.heard;
  return each.last;
}

}  // namespace shardwise

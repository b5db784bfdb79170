// Moving bytes: the data and the mail connections, and the thread. A link's mutex is held for every call on its sockets, so
// `forget` and `leave` know that nobody is within one.
#include "wire_words.h"

#include <algorithm>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

namespace shardwise {
namespace {

constexpr uint64_t kTurn = 1 << 20;  // bytes that one connection moves before another one has its turn
constexpr uint64_t kWorthWaking = 64 << 10;
constexpr size_t kSpans = 64;  // places of one system call
constexpr uint64_t kFrameHead = offsetof(Frame, data);
constexpr uint64_t kOwnKey = ~0ull;
constexpr int64_t kFarewell = 5 * kNanoseconds;

void set(int socket, int level, int option, int value) { setsockopt(socket, level, option, &value, sizeof value); }

// Adds to what is posted; true where there was nothing before.
bool post(std::deque<Wire::Posted>& posted, uint64_t& position, const std::vector<Wire::Span>& spans) {
  const bool idle = posted.empty();
  for (const Wire::Span& span : spans) {
    if (span.count == 0) continue;
    posted.push_back({span, false});
    position += span.count;
  }
  if (!posted.empty()) posted.back().ends = true;
  return idle && !posted.empty();
}

// How many bytes the first call still waits for, up to `most`. What later calls wait for may be sent only once its sender
// has heard of this rank again, which waits for the first.
uint64_t up_to(uint64_t most, const std::deque<Wire::Posted>& posted) {
  uint64_t bytes = 0;
  for (size_t i = 0; bytes < most; ++i) {
    bytes += posted[i].count;
    if (posted[i].ends) break;
  }
  return std::min(bytes, most);
}

// One call of `system` that moves what is posted first: up to a turn of it, from or to up to `kSpans` places.
template <class System>
Moved move_front(std::deque<Wire::Posted>& posted, std::atomic<uint64_t>& position, uint64_t& total, bool& done,
                 System system) {
  iovec places[kSpans];
  msghdr message{};
  message.msg_iov = places;
  uint64_t bytes = 0, count = 0;
  for (; message.msg_iovlen < std::min(kSpans, posted.size()) && bytes < kTurn; ++message.msg_iovlen) {
    const Wire::Span& span = posted[message.msg_iovlen];
    places[message.msg_iovlen] = {span.bytes, std::min(span.count, kTurn - bytes)};
    bytes += places[message.msg_iovlen].iov_len;
  }
  int error = 0;
  const Moved moved = move(count, error, [&] { return system(message); });
  total += count;
  position.fetch_add(count, std::memory_order_release);
  while (count != 0) {
    Wire::Span& span = posted.front();
    const uint64_t through = std::min(count, span.count);
    span.bytes += through, span.count -= through, count -= through;
    if (span.count != 0) break;
    posted.pop_front();
    done = true;
  }
  return moved;
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

Wire::~Wire() { end(); }

void Wire::end() {
  if (!thread_.joinable()) return;
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

uint64_t Wire::send(int peer, const std::vector<Span>& spans) {
  Link& each = link(peer);
  std::lock_guard<std::mutex> lock(each.mutex);
  if (post(each.out, each.posted_out, spans)) push_data(each);
  arm(each, peer, data, (each.in.empty() ? 0u : EPOLLIN) | (each.out.empty() ? 0u : EPOLLOUT));
  return each.posted_out;
}

uint64_t Wire::receive(int peer, const std::vector<Span>& spans) {
  Link& each = link(peer);
  std::lock_guard<std::mutex> lock(each.mutex);
  if (post(each.in, each.posted_in, spans)) pull_data(each);
  arm(each, peer, data, (each.in.empty() ? 0u : EPOLLIN) | (each.out.empty() ? 0u : EPOLLOUT));
  return each.posted_in;
}

// True where something posted is through, or nothing ever will be.
bool Wire::push_data(Link& link) {
  bool done = false;
  const auto put = [&](const msghdr& message) { return ::sendmsg(link.sockets[data], &message, MSG_NOSIGNAL | MSG_DONTWAIT); };
  for (uint64_t total = 0; !link.out.empty() && total < kTurn && !link.data_closed.load();) {
    const Moved moved = move_front(link.out, link.sent, total, done, put);
    if (moved == Moved::nothing) break;
    if (moved == Moved::some) continue;
    link.data_closed.store(true, std::memory_order_release);
    return true;
  }
  return done;
}

bool Wire::pull_data(Link& link) {
  bool done = false;
  const auto take = [&](msghdr& message) { return ::recvmsg(link.sockets[data], &message, MSG_DONTWAIT); };
  for (uint64_t total = 0; !link.in.empty() && total < kTurn && link.sockets[data] >= 0;) {
    const Moved moved = move_front(link.in, link.received, total, done, take);
    if (moved == Moved::nothing) break;
    if (moved == Moved::some) continue;
    link.data_closed.store(true, std::memory_order_release);
    return true;
  }
  // To be woken for each packet would cost more than the packets.
  const uint64_t worth_waking = link.in.empty() ? link.worth_waking : up_to(kWorthWaking, link.in);
  if (worth_waking != link.worth_waking) {
    set(link.sockets[data], SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(worth_waking));
    link.worth_waking = worth_waking;
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
    if (each.sockets[mail] < 0) ring = true;  // it closed just now, maybe behind frames that came
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

void Wire::close_lane(Link& link, Lane lane) {
  if (link.sockets[lane] < 0) return;
  ::shutdown(link.sockets[lane], SHUT_WR);  // what is under way still arrives
  close(link.sockets[lane]);
  link.sockets[lane] = -1;
  if (lane == mail) link.mail_closed.store(true, std::memory_order_release);
}

}  // namespace shardwise

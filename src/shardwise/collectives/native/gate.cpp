// Listening, calling, and telling ranks from strangers.
#include "gate.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

namespace shardwise {
namespace {

constexpr int64_t kStrangerPatience = 5 * kNanoseconds;  // for the first words of a caller
constexpr size_t kStrangersMost = 256;                   // and one a rank, whose words are on their way: the oldest goes
constexpr char kMagic[8] = {'s', 'h', 'a', 'r', 'd', 'w', 's', '1'};

// The first words of a caller; nothing else is read before they are right.
struct Greeting {
  char magic[8];
  Secret secret;
  int32_t from, to, lane;
};

struct Addresses {
  addrinfo* first = nullptr;
  Addresses(const std::string& host, const std::string& port, int kind, int flags) {
    addrinfo wanted{};
    wanted.ai_socktype = kind, wanted.ai_flags = flags;
    const int error = getaddrinfo(host.c_str(), port.c_str(), &wanted, &first);
    if (error != 0) throw Failure("shardwise engine: the address " + host + " is of no use: " + gai_strerror(error));
  }
  ~Addresses() { freeaddrinfo(first); }
};

std::string numeric(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST];
  return getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

[[noreturn]] void refuse(const std::string& what) {
  throw Failure("shardwise engine: " + what + ": " + std::strerror(errno));
}

// In constant time: how long it takes tells nothing of where they differ.
bool equal(const Secret& a, const Secret& b) {
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

// False with ETIMEDOUT once it is too late. A signal that comes meanwhile does not end the wait.
bool wait_for(int socket, short events, int64_t until) {
  pollfd one{socket, events, 0};
  for (int64_t rest; (rest = until - now()) > 0;) {
    const int ready = poll(&one, 1, static_cast<int>(std::min(rest, kNanoseconds) / 1000000) + 1);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
  errno = ETIMEDOUT;
  return false;
}

// Owns a socket until it is let go.
struct Caller {
  int socket;
  Greeting greeting{};
  size_t have = 0;
  int64_t came = now();
  explicit Caller(int socket) : socket(socket) {}
  ~Caller() {
    if (socket >= 0) close(socket);
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;
  int release() {
    const int let_go = socket;
    socket = -1;
    return let_go;
  }
};

// From the address that was chosen, so that both ends of a connection are where they should be.
std::unique_ptr<Caller> call(const std::string& own, const std::string& address, const std::string& port, int64_t until) {
  const Addresses to(address, port, SOCK_STREAM, AI_NUMERICHOST | AI_NUMERICSERV);
  const Addresses from(own, "0", SOCK_STREAM, AI_NUMERICHOST | AI_NUMERICSERV);
  const int made = socket(to.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (made < 0) refuse("no socket");
  auto caller = std::make_unique<Caller>(made);
  if (bind(made, from.first->ai_addr, from.first->ai_addrlen) != 0) refuse("the address " + own + " cannot be used");
  if (connect(made, to.first->ai_addr, to.first->ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return nullptr;
    int error = 0;
    socklen_t size = sizeof error;
    if (!wait_for(made, POLLOUT, until)) return nullptr;
    if (getsockopt(made, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
      errno = error;
      return nullptr;
    }
  }
  return caller;
}

// False where the gate gives none: with ETIMEDOUT, or another error, or none of them where it closes.
bool read_answer(int socket, Secret& answer, int64_t until) {
  for (size_t have = 0; have < answer.size();) {
    if (!wait_for(socket, POLLIN, until)) return false;
    const ssize_t got = recv(socket, answer.data() + have, answer.size() - have, MSG_DONTWAIT);
    if (got == 0) errno = 0;
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return false;
    have += got > 0 ? static_cast<size_t>(got) : 0;
  }
  return true;
}

// Those that came, until they have said who they are.
class Callers {
 public:
  Callers(int gate, const Gate::Party& party, std::vector<Sockets>& found) : gate_(gate), party_(party), found_(found) {}

  void wait() {
    std::vector<pollfd> all{{gate_, POLLIN, 0}};
    for (const auto& each : waiting_) all.push_back({each->socket, POLLIN, 0});
    poll(all.data(), all.size(), 100);
    for (size_t i = waiting_.size(); i-- > 0;) {
      const bool over = all[i + 1].revents != 0 && hear(*waiting_[i]);
      if (over || now() - waiting_[i]->came > kStrangerPatience) waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (int socket; (socket = accept4(gate_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) {
      waiting_.push_back(std::make_unique<Caller>(socket));
      if (waiting_.size() > kStrangersMost + found_.size()) drop_oldest();
    }
  }

 private:
  // To make room for another one. Its words may have come since it was looked at last.
  void drop_oldest() {
    hear(*waiting_.front());
    waiting_.erase(waiting_.begin());
  }

  // True where nothing more is expected of it: it became a connection or is nobody's.
  bool hear(Caller& caller) {
    char* to = reinterpret_cast<char*>(&caller.greeting) + caller.have;
    const ssize_t got = recv(caller.socket, to, sizeof(Greeting) - caller.have, MSG_DONTWAIT);
    if (got < 0) return errno != EAGAIN && errno != EINTR;
    if (got == 0) return true;
    caller.have += static_cast<size_t>(got);
    if (caller.have < sizeof(Greeting)) return false;
    if (!is_expected(caller.greeting)) return true;
    const Secret& answer = party_.answered;
    if (send(caller.socket, answer.data(), answer.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(answer.size())) return true;
    found_[caller.greeting.from][caller.greeting.lane] = caller.release();
    return true;
  }

  bool is_expected(const Greeting& greeting) const {
    if (std::memcmp(greeting.magic, kMagic, sizeof kMagic) != 0 || !equal(greeting.secret, party_.asked)) return false;
    const bool known = greeting.from > party_.rank && greeting.from < static_cast<int>(found_.size());
    return known && greeting.to == party_.rank && greeting.lane >= 0 && greeting.lane < kLanes &&
           !party_.addresses[greeting.from].empty() && found_[greeting.from][greeting.lane] < 0;
  }

  const int gate_;
  const Gate::Party& party_;
  std::vector<Sockets>& found_;
  std::vector<std::unique_ptr<Caller>> waiting_;
};

}  // namespace

std::string address_of_interface(const std::string& interface) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) refuse("the host's network interfaces cannot be listed");
  std::string found;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* each = all; each != nullptr && found.empty(); each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family || interface != each->ifa_name) continue;
      found = numeric(each->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    }
  }
  freeifaddrs(all);
  if (found.empty()) throw Failure("shardwise engine: this host has no address on the interface " + interface);
  return found;
}

std::string address_towards(const std::string& host, const std::string& port) {
  const Addresses to(host, port, SOCK_DGRAM, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  for (const addrinfo* each = to.first; each != nullptr; each = each->ai_next) {
    const Caller probe(socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));  // connected, it sends nothing
    if (probe.socket < 0 || connect(probe.socket, each->ai_addr, each->ai_addrlen) != 0) continue;
    if (getsockname(probe.socket, reinterpret_cast<sockaddr*>(&own), &size) == 0) {
      return numeric(reinterpret_cast<const sockaddr*>(&own), size);
    }
  }
  refuse("this host has no way to " + host);
}

Gate::Gate(const std::string& address) : address_(address) {
  const Addresses here(address, "0", SOCK_STREAM, AI_NUMERICHOST | AI_NUMERICSERV);
  socket_ = socket(here.first->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (socket_ < 0 || bind(socket_, here.first->ai_addr, here.first->ai_addrlen) != 0 || listen(socket_, 4096) != 0 ||
      getsockname(socket_, reinterpret_cast<sockaddr*>(&own), &size) != 0) {
    const int error = errno;
    if (socket_ >= 0) close(socket_);
    errno = error;
    refuse("the address " + address + " cannot be listened on");
  }
  const auto* at = reinterpret_cast<const sockaddr_in*>(&own);  // the port is at the same place for both families
  port_ = std::to_string(ntohs(at->sin_port));
}

Gate::~Gate() { close(socket_); }

std::vector<Sockets> Gate::meet(const Party& party, int64_t timeout) {
  const int size = static_cast<int>(party.addresses.size());
  const int64_t until = now() + timeout;
  std::vector<Sockets> found(size, Sockets{{-1, -1, -1}});
  const auto closed = [&](const std::string& why) {
    for (const Sockets& each : found) {
      for (const int socket : each) {
        if (socket >= 0) close(socket);
      }
    }
    return Failure("shardwise engine: " + why);
  };
  const auto is_called = [&](int peer) { return peer < party.rank && !party.addresses[peer].empty(); };
  const std::string fix = "; is it the right network? SHARDWISE_SOCKET_IFNAME chooses the interface";
  for (int peer = 0; peer < size; ++peer) {
    for (int lane = 0; is_called(peer) && lane < kLanes; ++lane) {
      Greeting greeting{};
      std::copy(std::begin(kMagic), std::end(kMagic), greeting.magic);
      greeting.secret = party.asked, greeting.from = party.rank, greeting.to = peer, greeting.lane = lane;
      const auto caller = call(address_, party.addresses[peer], party.ports[peer], until);
      if (!caller || ::send(caller->socket, &greeting, sizeof greeting, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof greeting)) {
        throw closed(party.who[peer] + " does not answer: " + std::strerror(errno) + fix);
      }
      found[peer][lane] = caller->release();
    }
  }
  Callers callers(socket_, party, found);
  const auto missing = [&] {
    std::string names;
    for (int peer = party.rank + 1; peer < size; ++peer) {
      const bool whole = std::all_of(found[peer].begin(), found[peer].end(), [](int socket) { return socket >= 0; });
      if (!party.addresses[peer].empty() && !whole) names += (names.empty() ? "" : ", ") + party.who[peer];
    }
    return names;
  };
  for (std::string names; !(names = missing()).empty(); callers.wait()) {
    if (now() > until) throw closed(names + " did not connect to " + party.who[party.rank] + fix);
  }
  for (int peer = 0; peer < size; ++peer) {
    for (int lane = 0; is_called(peer) && lane < kLanes; ++lane) {
      Secret answer{};
      const bool whole = read_answer(found[peer][lane], answer, until);
      if (!whole && errno == ETIMEDOUT) throw closed(party.who[peer] + " did not answer in time" + fix);
      if (!whole || !equal(answer, party.answered)) {
        throw closed(party.who[peer] + " did not answer as a rank of this group" + fix);
      }
    }
  }
  return found;
}

}  // namespace shardwise

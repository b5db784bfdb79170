// One call on a socket that does not block, and the words of the watch connections.
#pragma once

#include <cerrno>

#include <sys/socket.h>

#include "wire.h"

namespace shardwise {

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

inline Moved put(int socket, const void* bytes, uint64_t most, uint64_t& count, int& error) {
  return move(count, error, [&] { return ::send(socket, bytes, most, MSG_NOSIGNAL | MSG_DONTWAIT); });
}

inline Moved take(int socket, void* bytes, uint64_t most, uint64_t& count, int& error) {
  return move(count, error, [&] { return ::recv(socket, bytes, most, MSG_DONTWAIT); });
}

enum WordKind : uint32_t { heartbeat, failure, farewell, own_failure };

// What goes over the watch connection; `length` bytes of text follow.
struct Word {
  uint32_t kind, length;
  Call call;
};
constexpr uint32_t kTextMost = sizeof(Header::reason);

}  // namespace shardwise

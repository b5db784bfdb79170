// How the ranks of a group on different hosts come to their connections.
//
// Every rank listens on one address of its host while the group is made, and calls all ranks of other hosts with a lower
// number. A caller shows a secret that went through the store and the gate answers with another one. Whoever does not know
// it, says nothing or too much is dropped, and the gate goes on. It is closed when all are there.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "wire.h"

namespace shardwise {

using Secret = std::array<unsigned char, 32>;

// The address of an interface of this host; throws Failure where it has none.
std::string address_of_interface(const std::string& interface);
// The address from which this host reaches another one.
std::string address_towards(const std::string& host, const std::string& port);

class Gate {
 public:
  explicit Gate(const std::string& address);
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  const std::string& address() const { return address_; }
  const std::string& port() const { return port_; }

  struct Party {
    int rank;                                              // this one
    Secret asked, answered;
    std::vector<std::string> addresses, ports;             // of all ranks; empty for those of this host
    std::vector<std::string> who;
  };
  // All connections of this rank, by rank. Throws Failure after `timeout` nanoseconds, naming who did not come.
  std::vector<Sockets> meet(const Party& party, int64_t timeout);

 private:
  std::string address_, port_;
  int socket_ = -1;
};

}  // namespace shardwise

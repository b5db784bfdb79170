// How the members of a group find each other's memory, through the group's store; and the engine's errors in torch's class.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <sstream>

#include <sys/random.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "gate.h"
#include "hosts.h"

namespace shardwise {

using Milliseconds = std::chrono::milliseconds;

[[noreturn]] inline void raise(const std::string& message) { C10_THROW_ERROR(DistBackendError, message); }

// The engine's errors in torch's class of them.
template <class F>
void translated(F run) {
  try {
    run();
  } catch (const Failure& failure) {
    raise(failure.what());
  }
}

struct Met {
  std::unique_ptr<Room> room;
  std::unique_ptr<Wire> wire;  // none where all are on one host
};

// Where a rank talks to other hosts: the interface, or the host and port to reach where none is named.
struct Network {
  std::string interface, host, port;
};

// Who makes a group.
struct Meeting {
  c10d::Store& store;
  const Places& places;
  const std::vector<int>& names;
  const Network& network;
  Milliseconds timeout;

  void say(const std::string& key, const std::string& text) {
    store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
  }
  std::string hear(const std::string& key) {
    store.wait({key}, timeout);
    const std::vector<uint8_t> text = store.get(key);
    return std::string(text.begin(), text.end());
  }
};

// From the kernel: std::random_device asks the processor, which has no numbers left while many processes ask.
template <class Words>
void draw(Words& words) {
  if (getrandom(&words[0], sizeof words, 0) != static_cast<ssize_t>(sizeof words)) {
    throw Failure(std::string("shardwise engine: no random numbers (getrandom): ") + std::strerror(errno));
  }
}

// The first rank of a host makes the shared memory and says in the store where; the others open it.
inline std::unique_ptr<Room> find_room(Meeting& meeting, int& shown) {
  const Places& places = meeting.places;
  const std::vector<int>& here = places.hosts[places.node[places.rank]];
  const int local = places.local[places.rank], size = static_cast<int>(here.size());
  const std::string key = "place/" + std::to_string(here[0]);
  std::vector<int> names;
  for (const int rank : here) names.push_back(meeting.names[rank]);
  int process = 0, descriptor = -1;
  uint64_t token[2] = {};
  if (local == 0) {
    draw(token);
    try {
      shown = Room::create(size, token);
    } catch (const Failure& failure) {
      meeting.say(key, failure.what());
      throw;
    }
    std::ostringstream text;
    text << getpid() << ' ' << shown << ' ' << token[0] << ' ' << token[1];
    meeting.say(key, text.str());
    descriptor = dup(shown);
  } else {
    const std::string said = meeting.hear(key);
    std::istringstream text(said);
    text >> process >> descriptor >> token[0] >> token[1];
    if (text.fail()) throw Failure("shardwise engine: rank " + std::to_string(names[0]) + " made no shared memory: " + said);
    descriptor = Room::open(process, descriptor);
  }
  return std::make_unique<Room>(descriptor, local, size, token, names);
}

inline std::string gate_key(int rank) { return "gate/" + std::to_string(rank); }

// The group's first rank draws what all of them know and nobody else does. Before all else that may fail.
inline void say_secret(Meeting& meeting) {
  Secret asked, answered;
  draw(asked);
  draw(answered);
  meeting.say("secret", std::string(asked.begin(), asked.end()) + std::string(answered.begin(), answered.end()));
}

inline std::unique_ptr<Gate> open_gate(const Network& network) {
  return std::make_unique<Gate>(network.interface.empty() ? address_towards(network.host, network.port)
                                                          : address_of_interface(network.interface));
}

// Every rank has said where it listens, or why it cannot take part. Ranks of this host are heard too: whoever takes no part
// leaves those of other hosts at once, and they would be waited for here.
inline std::unique_ptr<Wire> connect(Meeting& meeting, Room& room, Gate& gate) {
  const Places& places = meeting.places;
  Gate::Party party;
  party.rank = places.rank;
  party.addresses.resize(places.size()), party.ports.resize(places.size()), party.who.resize(places.size());
  for (int peer = 0; peer < places.size(); ++peer) {
    const std::string said = meeting.hear(gate_key(peer)), name = "rank " + std::to_string(meeting.names[peer]);
    std::istringstream text(said);
    std::string address, port, process;
    text >> address >> port >> process;
    if (text.fail() || said.find("shardwise") == 0) throw Failure("shardwise engine: " + name + " takes no part: " + said);
    party.who[peer] = name + " (process " + process + " at " + address + ")";
    if (places.is_remote(peer)) party.addresses[peer] = address, party.ports[peer] = port;
  }
  const std::string secret = meeting.hear("secret");
  if (secret.size() != party.asked.size() + party.answered.size()) throw Failure("shardwise engine: the group's secret is not one");
  std::copy_n(secret.begin(), party.asked.size(), party.asked.begin());
  std::copy_n(secret.begin() + static_cast<std::ptrdiff_t>(party.asked.size()), party.answered.size(), party.answered.begin());
  const int64_t patience = std::chrono::nanoseconds(meeting.timeout).count();
  return std::make_unique<Wire>(room, gate.meet(party, patience), meeting.names, party.who);
}

// Makes what a group has in common. All ranks say how it went, so all know, and all fail where one does.
inline Met meet(Meeting meeting) {
  const Places& places = meeting.places;
  const auto key = [](int rank) { return "here/" + std::to_string(rank); };
  const bool several_hosts = places.hosts.size() > 1;
  Met met;
  std::unique_ptr<Gate> gate;
  int shown = -1;
  std::string problem;
  const auto attempt = [&](auto part) {
    try {
      if (problem.empty()) part();
    } catch (const Failure& failure) {
      problem = failure.what();
    }
  };
  if (several_hosts && places.rank == 0) attempt([&] { say_secret(meeting); });
  attempt([&] { met.room = find_room(meeting, shown); });
  if (several_hosts) {
    attempt([&] { gate = open_gate(meeting.network); });
    meeting.say(gate_key(places.rank), problem.empty() ? gate->address() + ' ' + gate->port() + ' ' + std::to_string(getpid()) : problem);
    attempt([&] { met.wire = connect(meeting, *met.room, *gate); });
  }
  meeting.say(key(places.rank), problem);
  for (int peer = 0; peer < places.size(); ++peer) {
    const std::string theirs = meeting.hear(key(peer));
    if (problem.empty()) problem = theirs;
  }
  if (shown >= 0) close(shown);
  if (!problem.empty()) {
    met.wire.reset();
    raise(problem);
  }
  return met;
}

}  // namespace shardwise

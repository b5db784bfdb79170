// How the members of a group find each other's memory, through the group's store; and the engine's errors in torch's class.
#pragma once

#include <chrono>
#include <memory>
#include <random>
#include <sstream>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "room.h"

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

struct Place {
  int process = 0, descriptor = -1;
  uint64_t token[2] = {};
};

// Rank 0 makes the shared memory and says in the store where; the others open it and say how it went. So all know.
inline std::unique_ptr<Room> meet(c10d::Store& store, int rank, int size, const std::vector<int>& names, Milliseconds timeout) {
  const auto say = [&](const std::string& key, const std::string& text) {
    store.set(key, std::vector<uint8_t>(text.begin(), text.end()));
  };
  const auto hear = [&](const std::string& key) {
    store.wait({key}, timeout);
    const std::vector<uint8_t> text = store.get(key);
    return std::string(text.begin(), text.end());
  };
  std::unique_ptr<Room> room;
  int shown = -1;
  std::string problem;
  try {
    Place place;
    if (rank == 0) {
      std::random_device random;
      for (uint64_t& word : place.token) word = (static_cast<uint64_t>(random()) << 32) | random();
      place.process = getpid();
      place.descriptor = Room::create(size, place.token);
      shown = place.descriptor;
      std::ostringstream text;
      text << place.process << ' ' << place.descriptor << ' ' << place.token[0] << ' ' << place.token[1];
      say("place", text.str());
      place.descriptor = dup(shown);
    } else {
      const std::string said = hear("place");
      std::istringstream text(said);
      text >> place.process >> place.descriptor >> place.token[0] >> place.token[1];
      if (text.fail()) throw Failure("shardwise engine: rank " + std::to_string(names[0]) + " made no shared memory: " + said);
      place.descriptor = Room::open(place.process, place.descriptor);
    }
    room = std::make_unique<Room>(place.descriptor, rank, size, place.token, names);
  } catch (const Failure& failure) {
    problem = failure.what();
    if (rank == 0 && shown < 0) say("place", problem);
  }
  say("here/" + std::to_string(rank), problem);
  for (int peer = 0; peer < size; ++peer) {
    const std::string theirs = hear("here/" + std::to_string(peer));
    if (problem.empty()) problem = theirs;
  }
  if (shown >= 0) close(shown);
  if (!problem.empty()) raise(problem);
  return room;
}

}  // namespace shardwise

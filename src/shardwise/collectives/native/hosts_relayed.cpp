// Broadcast and reduce between hosts. What is large leaves, or reaches, the root's host once and not once a host: the
// hosts' other leaders, one a host, each take a piece of every block and pass it on to each other, or add it for the root.
#include "hosts_exchange.h"

namespace shardwise {
namespace {

constexpr uint64_t kToAll = 64 << 10;  // up to this many bytes a second hop costs more than the root's link
constexpr uint64_t kAhead = 4;         // blocks that the root is ahead of its connections, and half as many a helper

}  // namespace

// The leaders of all hosts but the root's, the next host's first.
std::vector<int> Hosts::helpers(int root) const {
  std::vector<int> found;
  for (int i = 1; i < host_count(); ++i) found.push_back(leader((places_.node[root] + i) % host_count(), root));
  return found;
}

// The blocks of a broadcast on their way between hosts. A block has one piece a helper, or is one piece for all of them.
class Hosts::Relay {
 public:
  Relay(Hosts& hosts, int root, void* data, uint64_t bytes)
      : hosts_(hosts), data_(data), bytes_(bytes), root_(root), helpers_(hosts.helpers(root)),
        passed_on_(bytes > kToAll && helpers_.size() > 1), pieces_(passed_on_ ? helpers_.size() : 1),
        part_(aligned(kRound / pieces_)), mine_(helpers_.size()), until_(helpers_.size()) {
    for (size_t i = 0; i < helpers_.size(); ++i) {
      if (helpers_[i] == hosts.places_.rank) mine_ = i;
    }
    for (uint64_t c = 0; helps() && c < chunks(); ++c) {
      for (size_t p = 0; p < pieces_; ++p) {
        const int from = !passed_on_ || p == mine_ ? root : helpers_[p];
        until_[p].push_back(hosts.wire_.receive(from, at(data, begin(c, p)), length(c, p)));
      }
    }
    for (uint64_t c = 0; c < kAhead; ++c) send(c);
    for (uint64_t c = 0; c < kAhead / 2; ++c) pass_on(c);
  }

  uint64_t block() const { return part_ * pieces_; }

  // Block `c` is here afterwards, and those that follow are on their way.
  void await(uint64_t c) {
    if (root_ == hosts_.places_.rank && c < chunks()) {
      for (size_t i = 0; i < helpers_.size(); ++i) hosts_.await_sent(helpers_[i], until_[i][c]);
      send(c + kAhead);
    }
    if (!helps() || c >= chunks()) return;
    pass_on(c + kAhead / 2);
    for (size_t p = 0; p < pieces_; ++p) hosts_.await_received(!passed_on_ || p == mine_ ? root_ : helpers_[p], until_[p][c]);
  }

 private:
  bool helps() const { return mine_ < helpers_.size(); }
  uint64_t chunks() const { return chunks_of(bytes_, block()); }
  uint64_t begin(uint64_t c, size_t p) const { return std::min(bytes_, c * block() + p * part_); }
  uint64_t length(uint64_t c, size_t p) const { return std::min(part_, bytes_ - begin(c, p)); }

  void send(uint64_t c) {
    if (root_ != hosts_.places_.rank || c >= chunks()) return;
    for (size_t i = 0; i < helpers_.size(); ++i) {
      const size_t p = passed_on_ ? i : 0;
      until_[i].push_back(hosts_.wire_.send(helpers_[i], at(data_, begin(c, p)), length(c, p)));
    }
  }

  void pass_on(uint64_t c) {
    if (!helps() || !passed_on_ || c >= chunks()) return;
    hosts_.await_received(root_, until_[mine_][c]);
    for (size_t i = 1; i < helpers_.size(); ++i) {
      hosts_.wire_.send(helpers_[(mine_ + i) % helpers_.size()], at(data_, begin(c, mine_)), length(c, mine_));
    }
  }

  Hosts& hosts_;
  void* const data_;
  const uint64_t bytes_;
  const int root_;
  const std::vector<int> helpers_;
  const bool passed_on_;
  const size_t pieces_;
  const uint64_t part_;
  size_t mine_;                               // which helper this rank is, or none
  std::vector<std::vector<uint64_t>> until_;  // where block c ends: of the root by helper, of a helper by piece
};

void Hosts::broadcast(Call call, void* data, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(partners_);
    const uint64_t bytes = call.count * call.item;
    const int here = places_.local[leader(node_, call.root)];
    Relay relay(*this, call.root, data, bytes);
    const auto stage = [&](uint64_t offset, uint64_t length) {
      relay.await(offset / relay.block());
      if (room_.rank == here && room_.size > 1) copy(mine(), at(data, offset), length);
    };
    const auto take = [&](uint64_t offset, uint64_t length) {
      if (room_.rank != here) copy(at(data, offset), theirs(here), length);
    };
    rounds(bytes, relay.block(), stage, take);
  });
}

// One rank of each host makes its host's sum of a block and sends a piece of it to each adder, who adds the hosts' `lag`
// rounds later and sends the root the result. The adders are the helpers, or the root alone.
void Hosts::reduce(Call call, const void* input, void* output, int64_t timeout) {
  operate(call, timeout, [&] {
    greet(partners_);
    const bool root = places_.rank == call.root, leads = places_.rank == leader(node_, call.root);
    const std::vector<int> helping = helpers(call.root);
    const bool spread = call.count * call.item > kToAll && helping.size() > 1;
    const std::vector<int> adders = spread ? helping : std::vector<int>{call.root};
    const uint64_t item = call.item, step = aligned(kRound / adders.size()), block = step * adders.size();
    const uint64_t bytes = call.count * item, chunks = std::max<uint64_t>(1, chunks_of(bytes, block));
    const auto begin = [&](uint64_t c, size_t a) { return std::min(bytes, c * block + a * step); };
    const auto length = [&](uint64_t c, size_t a) { return std::min(step, bytes - begin(c, a)); };
    const auto own = static_cast<size_t>(std::find(adders.begin(), adders.end(), places_.rank) - adders.begin());
    const bool adds = own < adders.size();
    std::vector<int> leaders = helping;
    leaders.push_back(call.root);
    leaders.erase(std::remove(leaders.begin(), leaders.end(), places_.rank), leaders.end());
    const uint64_t wide = accumulated(step / item), lag = depth(chunks, wide), slots = lag + 1;
    Exchange exchange(*this, leads ? leaders : std::vector<int>{}, slots, wide);
    char* const kept = scratch_.take(slots * wide);
    const auto expect = [&](uint64_t c) {
      for (const int peer : leaders) {
        if (adds && c < chunks) exchange.expect(peer, c, accumulated(length(c, own) / item));
      }
    };
    for (uint64_t c = 0; c < slots; ++c) expect(c);
    std::vector<const void*> parts(room_.size), partials(host_count());
    const auto add_here = [&](uint64_t c) {
      for (size_t a = 0; a < adders.size(); ++a) {
        const uint64_t from = begin(c, a), count = length(c, a) / item;
        for (int l = 0; l < room_.size; ++l) parts[l] = l == room_.rank ? at(input, from) : theirs(l) + a * step;
        partial(a == own ? kept + c % slots * wide : exchange.outgoing(adders[a], c), parts, count);
        if (a != own) exchange.send(adders[a], c, accumulated(count));
        if (root && spread) wire_.receive(adders[a], at(output, from), length(c, a));  // it may be where the input was
      }
    };
    const auto add_hosts = [&](uint64_t c) {
      for (int h = 0; h < host_count(); ++h) {
        partials[h] = h == node_ ? kept + c % slots * wide : exchange.incoming(leader(h, call.root), c);
      }
      final_sum(root ? at(output, begin(c, own)) : exchange.outgoing(call.root, c), partials, length(c, own) / item);
      if (!root) exchange.send(call.root, c, length(c, own));
      expect(c + slots);
    };
    for (uint64_t round = 0; round < chunks + lag; ++round) {
      if (round < chunks) {
        const uint64_t from = std::min(bytes, round * block);
        if (!leads) copy(mine(), at(input, from), std::min(block, bytes - from));
        meet();
        if (round == 0) compare();
        if (leads) add_here(round);
      }
      if (adds && round >= lag) add_hosts(round - lag);
    }
  });
}

}  // namespace shardwise

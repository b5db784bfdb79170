// What all operations between hosts share: beginning, headings, waiting for bytes, and saying who does not come.
#include "hosts.h"

#include "hosts_await.h"

namespace shardwise {
namespace {

constexpr uint64_t kUnderWay = 640 << 10;           // bytes on a host's link: 5 ms of 1 Gbit/s, 0.5 ms of 10 Gbit/s
constexpr uint64_t kShare = 24;                     // or this part of an operation, where that is more
constexpr uint64_t kShallowest = 2, kDeepest = 64;  // in chunks of a pair

}  // namespace

Places::Places(int rank, std::vector<std::vector<int>> all) : rank(rank), hosts(std::move(all)) {
  size_t count = 0;
  for (const auto& host : hosts) count += host.size();
  node.resize(count), local.resize(count);
  for (size_t h = 0; h < hosts.size(); ++h) {
    for (size_t l = 0; l < hosts[h].size(); ++l) {
      node.at(hosts[h][l]) = static_cast<int>(h);
      local.at(hosts[h][l]) = static_cast<int>(l);
    }
  }
}

bool Places::uniform() const {
  return std::all_of(hosts.begin(), hosts.end(), [&](const auto& host) { return host.size() == hosts[0].size(); });
}

Hosts::Hosts(Room& room, Wire& wire, Places places)
    : Group(room), wire_(wire), places_(std::move(places)), node_(places_.node[places_.rank]), uniform_(places_.uniform()),
      greeted_(places_.size()) {
  for (int i = 1; i < host_count(); ++i) {
    for (const int peer : places_.hosts[(node_ + i) % host_count()]) {
      remote_.push_back(peer);
      if (!uniform_ || places_.local[peer] == room_.rank) partners_.push_back(peer);
    }
  }
}

// Ranks that are far ahead of others leave links idle at the end, ranks that are not ahead at all while they wait.
uint64_t Hosts::depth(uint64_t chunks, uint64_t bytes) const {
  const uint64_t pairs = partners_.size() * room_.size;
  const uint64_t most = std::max<uint64_t>(1, std::min(chunks, kDeepest));
  return std::min(most, std::max({kShallowest, chunks / kShare, kUnderWay / std::max<uint64_t>(1, bytes * pairs)}));
}

// With whom headings are exchanged in an operation with a root that exchanges data with every rank.
std::vector<int> Hosts::with_root(int root) const {
  if (root == places_.rank) return remote_;
  std::vector<int> peers = partners_;
  if (places_.is_remote(root) && std::find(peers.begin(), peers.end(), root) == peers.end()) peers.push_back(root);
  return peers;
}

// Of each host one rank exchanges data with the root for all: that of its local index, or one of those there are.
int Hosts::leader(int node, int root) const {
  return rank_at(node, places_.local[root] % static_cast<int>(places_.hosts[node].size()));
}

// For errors that are none of the engine's own: no memory, say.
void Hosts::break_room(const std::exception& error) {
  try {
    if (dynamic_cast<const Failure*>(&error) == nullptr) room_.fail("rank " + room_.called(room_.rank) + ": " + error.what());
  } catch (const Failure&) {  // raised again where it came from
  }
}

void Hosts::greet(const std::vector<int>& peers, const std::vector<Piece>* sent, const std::vector<Piece>* expected) {
  for (const int peer : peers) {
    Greeted& each = greeted_[peer];
    each.said = Heading{call_, sent ? (*sent)[peer].bytes : 0, expected ? (*expected)[peer].bytes : 0};
    each.until = wire_.receive(peer, &each.heard, sizeof each.heard);
    each.open = true;
    wire_.send(peer, &each.said, sizeof each.said);
  }
}

void Hosts::check_headings() {
  for (const int peer : remote_) {
    Greeted& each = greeted_[peer];
    if (!each.open || wire_.received(peer) < each.until) continue;
    each.open = false;
    end_text(each.heard.call);
    const Heading &said = each.said, &heard = each.heard;
    const bool same_sizes = said.to_receiver == heard.from_receiver && said.from_receiver == heard.to_receiver;
    if (differs(said.call, heard.call) || !same_sizes) refuse_heading(peer);
  }
}

void Hosts::refuse_heading(int peer) {
  const Heading &said = greeted_[peer].said, &heard = greeted_[peer].heard;
  const std::string us = room_.called(room_.rank), them = wire_.called(peer);
  const Call& other = heard.call;
  if (other.kind > Kind::receive || other.number > Number::other || other.reduce > Reduce::none) {
    room_.fail("rank " + them + " sent no heading of an operation where " + describe(call_) + " expected one");
  }
  if (differs(said.call, heard.call)) {
    const bool first = places_.rank < peer;
    room_.fail(first ? difference({us, them}, {said.call, heard.call}) : difference({them, us}, {heard.call, said.call}));
  }
  const bool ours = said.to_receiver != heard.from_receiver;
  room_.fail(describe(call_) + ": rank " + (ours ? us : them) + " sends " +
             std::to_string(ours ? said.to_receiver : heard.to_receiver) + " bytes to rank " + (ours ? them : us) +
             ", which expects " + std::to_string(ours ? heard.from_receiver : said.from_receiver));
}

void Hosts::await_received(int peer, uint64_t position) {
  await([&] { return wire_.received(peer) >= position; });
}

void Hosts::await_sent(int peer, uint64_t position) {
  await([&] { return wire_.sent(peer) >= position; });
}

// The end of every operation: nothing of the caller's memory is in use any more, and all headings were right.
void Hosts::await_all() {
  await([&] {
    return std::all_of(remote_.begin(), remote_.end(), [&](int peer) {
      return !greeted_[peer].open && wire_.sent(peer) >= wire_.posted_out(peer) && wire_.received(peer) >= wire_.posted_in(peer);
    });
  });
}

void Hosts::look_at_hosts() {
  room_.throw_if_broken();
  for (const int peer : remote_) {
    const bool waits = wire_.sent(peer) < wire_.posted_out(peer) || wire_.received(peer) < wire_.posted_in(peer);
    const std::string failed = waits ? wire_.failed(peer, call_.sequence) : "";
    if (!failed.empty()) room_.fail(failed + "; " + describe(call_) + " waits for it");
    if (!waits || !wire_.closed(peer)) continue;
    const std::string gone = wire_.gone(peer);  // told by another connection, which may be a moment later
    if (!gone.empty()) room_.fail(gone + "; " + describe(call_) + " waits for it");
  }
  if (now() - began_ > timeout_) give_up();
}

// Those that are not in this operation yet, wherever they are. Where all are, what keeps it waiting is the network.
std::string Hosts::missing() const {
  std::string text;
  const auto add = [&](const std::string& more) { text += (text.empty() ? "" : "; ") + more; };
  for (int peer = 0; peer < room_.size; ++peer) {
    const Member& member = room_.member(peer);
    const int64_t heard = member.heard.load(std::memory_order_relaxed);
    const bool behind = member.announced.load(std::memory_order_acquire) < call_.sequence;
    if (behind && peer != room_.rank) add(last_seen(room_.called(peer), last_call(member), heard));
  }
  for (const int peer : remote_) {
    int64_t heard = 0;
    const Call last = wire_.last_call(peer, heard);
    if (last.sequence < call_.sequence) add(last_seen(wire_.called(peer), last, heard));
  }
  for (const int peer : remote_) {
    const uint64_t rest = wire_.posted_in(peer) - wire_.received(peer);
    if (text.empty() && rest != 0) add(std::to_string(rest) + " bytes of " + wire_.who(peer));
  }
  return text.empty() ? Group::missing() : text;
}

void Hosts::partial(void* out, const std::vector<const void*>& inputs, uint64_t elements) const {
  Call call = call_;
  if (call.reduce == Reduce::average) call.reduce = Reduce::sum;
  std::vector<double> factors(inputs.size(), 1.0);
  for (int peer = 0; peer < room_.size; ++peer) factors[peer] = room_.member(peer).calls[call_.sequence % 2].factor;
  const Types types{call.number, accumulator(call.number)};
  shardwise::reduce(types, call.reduce, out, inputs, factors, elements, inputs.size());
}

void Hosts::final_sum(void* out, const std::vector<const void*>& partials, uint64_t elements) const {
  const Reduce operation = call_.reduce == Reduce::scaled_sum ? Reduce::sum : call_.reduce;
  const Types types{accumulator(call_.number), call_.number};
  shardwise::reduce(types, operation, out, partials, std::vector<double>(partials.size(), 1.0), elements, places_.size());
}

// One input a rank of the group, in the order of the ranks.
void Hosts::sum_all(void* out, const std::vector<const void*>& inputs, uint64_t elements) const {
  std::vector<double> factors(inputs.size(), 1.0);
  for (const int peer : remote_) factors[peer] = greeted_[peer].heard.call.factor;
  for (int peer = 0; peer < room_.size; ++peer) factors[locals()[peer]] = room_.member(peer).calls[call_.sequence % 2].factor;
  shardwise::reduce({call_.number, call_.number}, call_.reduce, out, inputs, factors, elements, inputs.size());
}

}  // namespace shardwise

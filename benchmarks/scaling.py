"""draft"""
import sys, time
from shardwise.planner.constants.inventory import cluster, presets, stack_of
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.planner.formulas.compute import BYTES, head_work, optimizer_seconds
from shardwise.planner.formulas.axis_traffic import elements_of_rank
from shardwise.planner.formulas.layer import block_time
from shardwise.planner.formulas.communication import DIRECT
from benchmarks.scaling_events import Machines, StepWork, simulated_seconds

STACK = "fms-fsdp FSDP1"
def scenario(model, instance, nodes, shard, batch, collectives):
    c = cluster(f"{instance}:{nodes}")
    shard = shard or c.size
    return TrainingConfiguration(model=presets()[model], cluster=c, stack=stack_of(STACK), sequence=4096, microbatch=batch,
        shard=shard, replica=c.size//shard, checkpointing="full", collectives=collectives, reduction="bf16", fused=False, compile=False)

def events(given):
    t = block_time(given); c = given.cluster; m = given.model
    f, b = head_work(given)
    nat, red = BYTES[given.precision], BYTES[given.reduction]
    ends = m.embedding_parameters*2
    el = elements_of_rank(given, m.layers)
    work = StepWork(m.layers, t.forward.device, t.backward.device+t.again.device, f.device+b.device,
       optimizer_seconds(sum(el)/given.shard, given), m.layer_parameters*nat, m.layer_parameters*red, ends*nat, ends*red)
    mach = Machines(c.nodes, c.per_node, c.accelerator.units, c.inter*1e9*c.fabric.bandwidth*given.stack.network, c.inter*1e9*DIRECT,
       c.intra*1e9*c.link.bandwidth, c.fabric.hop_seconds, c.link.hop_seconds, given.shard, given.collectives=="smddp")
    return work, mach

if __name__ == "__main__":
    for model, inst, shard, batch in (("llama2-7b","p4d.24xlarge",8,4),("llama2-7b","p4d.24xlarge",0,4),("llama2-70b","p4d.24xlarge",256,2),("llama2-70b","p4d.24xlarge",0,2),("llama2-7b","p5.48xlarge",8,4),("llama2-70b","p5.48xlarge",64,2),("llama2-70b","p5.48xlarge",0,2)):
      for coll in ("nccl","smddp"):
        if coll=="smddp" and "p4d" not in inst: continue
        for nodes in map(int, sys.argv[1].split(",")):
            g = scenario(model, inst, nodes, shard, batch, coll)
            p = predict(g)
            w, m = events(g)
            t0=time.time(); s = simulated_seconds(w, m, 1)
            print(model, inst, coll, shard, nodes, f"closed {p.step_seconds:.3f} sim {s:.3f} diff {100*(s/p.step_seconds-1):+.1f}%  fits {p.fits} waits {p.waits:.3f} cpu {time.time()-t0:.1f}", {k: round(v,3) for k,v in p.seconds.items() if v>1e-4}, flush=True)

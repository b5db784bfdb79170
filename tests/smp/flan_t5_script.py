"""Training of T5, or of BART, as SMP's users write it: padded pairs, stages, checkpointed blocks; run by test_run.py,
unchanged."""

import os
import sys

import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import translate_hf_state_dict_to_smdistributed
from transformers import AutoModelForSeq2SeqLM, BartConfig, T5Config

ROWS, LENGTH, ANSWER, VOCABULARY = 8, 12, 7, 64


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, labels):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask, labels):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)["loss"]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (ROWS, 1), generator=generator)).long()
    labels = ids[:, :ANSWER].clone()
    labels[:, -2:] = -100
    return ids * mask, mask, labels


def main():
    smp.init()
    assert translate_hf_state_dict_to_smdistributed and smp.pp_size() == 2
    torch.cuda.set_device(smp.local_rank())
    torch.manual_seed(0)
    config = T5Config(d_model=24, d_kv=6, d_ff=48, num_layers=3, num_decoder_layers=2, num_heads=4, dropout_rate=0.0,
                      vocab_size=VOCABULARY, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
                      relative_attention_num_buckets=8, tie_word_embeddings=sys.argv[1] == "tied")  # fmt: skip
    if sys.argv[1] == "bart":
        config = BartConfig(d_model=24, encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, dropout=0.0,
                            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0,
                            vocab_size=VOCABULARY, max_position_embeddings=LENGTH)  # fmt: skip
    with smp.model_creation(tensor_parallelism=False, dtype=torch.float32):
        model = AutoModelForSeq2SeqLM.from_config(config)
    whole = smp.rank() == 0 and AutoModelForSeq2SeqLM.from_config(config)
    if whole:
        whole.load_state_dict(model.state_dict())
    model = smp.DistributedModel(model, trace_device="gpu")
    module = model.get_module()
    for stack in (module.get_encoder(), module.get_decoder()):
        for block in (stack.layers if sys.argv[1] == "bart" else stack.block).children():
            smp.set_activation_checkpointing(block)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    losses, steps = [], int(sys.argv[2])
    directory = os.path.join(os.environ["SM_MODEL_DIR"], "parts")
    for step in range(steps):
        if step == steps - 1:
            smp.resume_from_checkpoint(directory, tag="last", partial=True)
        optimizer.zero_grad(set_to_none=True)
        losses.append(train_step(model, optimizer, *(tensor.cuda() for tensor in batch(step))).reduce_mean().item())
        optimizer.step()
        if step == steps - 2:
            smp.save_checkpoint(directory, tag="last", partial=True, model=model, optimizer=optimizer)
    model.eval()
    with torch.no_grad():
        losses.append(test_step(model, *batch(steps)).reduce_mean().item())
    weights = model.state_dict() if smp.rdp_rank() == 0 else None
    if smp.rank() == 0:
        torch.save({"losses": losses, "weights": weights, "start": whole.state_dict(),
                    "config": config.to_json_string(), "batches": [batch(step) for step in range(steps + 1)]},
                   os.path.join(os.environ["SM_MODEL_DIR"], "result.pt"))  # fmt: skip
    smp.barrier()


if __name__ == "__main__":
    main()

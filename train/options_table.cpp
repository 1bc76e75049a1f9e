// The commands and the table of options.
#include "train/options.h"

namespace onescale {
namespace {

constexpr double below_one = 0.999999;
// So that a product of two, of sizes, rows or steps, fits in 64 bits; those of the model are check_config's.
constexpr double sizes = 1 << 28, rows = 1 << 20, counts = 1e12;

}  // namespace

const std::vector<Command>& commands() {
  static const std::vector<Command> list = {
      {"prepare", 'p', "turn files, directories or JSON lines into a tokenizer and token shards"},
      {"train", 't', "train a model from scratch or from a Hugging Face directory; run again, it continues"},
      {"eval", 'e', "loss, perplexity and bits per byte of a model on prepared data"},
      {"generate", 'g', "continue a prompt, or fill in between a prompt and a suffix"},
      {"export", 'x', "write a checkpoint as a small directory that transformers loads"},
      {"plan", 'l', "memory by kind, bytes sent and FLOPs per token of a step, without running it"},
      {"gradients", 'r', "loss and every gradient of a model on a batch, to compare with another trainer"},
      {"verify", 'v', "prove that a layout's gradients are those of one process, or check another trainer's"}};
  return list;
}

// One option a line.
// clang-format off
const std::vector<Option>& option_table() {
  using O = Options;
  static const std::vector<Option> table = [] {
    std::vector<Option> all;
    const auto add = [&](std::string_view group, std::vector<Option> rows) {
      for (Option& row : rows) row.group = group, all.push_back(row);
    };
    add(sizes_group, {
      {"vocab_size", &O::vocab_size, "tlp!", "rows of the vocabulary; 0: those of the data's tokenizer", 0, sizes},
      {"n_positions", &O::n_positions, "tl!", "longest sequence", 1, sizes},
      {"n_embd", &O::n_embd, "tl!", "width", 1, sizes},
      {"n_layer", &O::n_layer, "tl!", "blocks", 1, sizes},
      {"n_head", &O::n_head, "tl!", "attention heads", 1, sizes},
      {"n_inner", &O::n_inner, "tl!", "width of the MLP; 0: 4 * n_embd", 0, sizes},
      {"multi_query", &O::multi_query, "tl!", "one K/V head for all query heads"},
      {"activation_function", &O::activation_function, "tl!", "of the MLP", 0, 0, "gelu_pytorch_tanh|gelu"},
      {"layer_norm_epsilon", &O::layer_norm_epsilon, "tl!", "added to the variance", 1e-12, 1},
      {"scale_attn_weights", &O::scale_attn_weights, "tl!", "divide scores by sqrt(head size)"},
      {"tie_word_embeddings", &O::tie_word_embeddings, "tl!", "the head is the token embedding"},
      {"initializer_range", &O::initializer_range, "tl!", "standard deviation of the first weights", 0, 10},
    });
    add("Run", {
      {"embd_pdrop", &O::embd_pdrop, "tl", "dropout of the embeddings", 0, below_one},
      {"resid_pdrop", &O::resid_pdrop, "tl", "dropout of each block's outputs", 0, below_one},
      {"attn_pdrop", &O::attn_pdrop, "tl", "dropout of the attention weights", 0, below_one},
      {"run_dir", &O::run_dir, "T/", "directory of the run: configuration, metrics, log, checkpoints"},
      {"model", &O::model, "tEGXlRv/!", "Hugging Face directory, checkpoint or run directory to read"},
      {"data", &O::data, "TE/", "directory that prepare wrote"},
      {"seed", &O::seed, "tpg!", "of first weights, dropout, sample order, sampling"},
      {"steps", &O::steps, "t", "optimizer steps of the whole run", 1, counts},
      {"seq_len", &O::seq_len, "tel!", "tokens a row; 0: n_positions", 0, sizes},
      {"global_batch", &O::global_batch, "tl", "rows of a step", 1, rows},
      {"micro_batch", &O::micro_batch, "telr", "rows at once; 0, for gradients alone: all", 0, rows},
      {"recompute", &O::recompute, "tlrv", "what backward computes again to save memory", 0, 0, "none|light|block"},
      {"dtype", &O::dtype, "tegxlrv", "of activations and products, or of the exported file", 0, 0, "float32|bfloat16"},
      {"device", &O::device, "tegrv", "where to compute", 0, 0, "auto|cpu|cuda"},
      {"isa", &O::isa, "teglrv", "instructions of the CPU: x86-64-v3 (AVX2), v4 (AVX-512); auto: the most it has", 0, 0, "auto|v3|v4"},
      {"threads", &O::threads, "tpeglrv", "0: all that the process may use", 0, 4096},
    });
    add("Layout", {
      {"sp", &O::sp, "tlrv", "sequence-parallel degree", 1, 4096},
      {"tp", &O::tp, "tlrv", "tensor-parallel degree", 1, 4096},
      {"zero", &O::zero, "tlrv", "ZeRO stage: what ranks shard", 0, 3},
      {"sp_mode", &O::sp_mode, "tlrv", "what sequence-parallel ranks exchange", 0, 0, "ulysses|gather_kv"},
      {"reduction", &O::reduction, "tlrv", "how gradients are summed", 0, 0, "ordered|reduce_scatter|all_reduce"},
      {"bucket_mb", &O::bucket_mb, "tlrv", "MiB of gradients reduced at once", 1e-6, 1e6},
      {"reduce_dtype", &O::reduce_dtype, "tlrv", "of gradients on the wire", 0, 0, "float32|bfloat16"},
      {"world", &O::world, "l", "ranks to plan for", 1, 1 << 20},
      {"comm_timeout", &O::comm_timeout, "trv", "seconds after which a waiting rank ends the job", 1, 1e6},
      {"check_replicas", &O::check_replicas, "t", "steps between checks that replicas are equal; 0: none", 0, counts},
      {"trace", &O::trace, "t", "file for a Chrome trace of computation and communication"},
      {"trace_steps", &O::trace_steps, "t", "steps in the trace", 1, counts},
    });
    add("Optimizer", {
      {"optimizer", &O::optimizer, "tl!", "adamw, or sgd without momentum", 0, 0, "adamw|sgd"},
      {"lr", &O::lr, "t", "highest learning rate"},
      {"min_lr", &O::min_lr, "t", "learning rate at the end"},
      {"warmup_steps", &O::warmup_steps, "t", "steps of linear warm-up", 0, counts},
      {"schedule", &O::schedule, "t", "of the learning rate", 0, 0, "cosine|linear|constant|wsd"},
      {"decay_steps", &O::decay_steps, "t", "last steps of wsd, which decay linearly", 0, counts},
      {"beta1", &O::beta1, "t", "AdamW's decay of the first moment", 0, below_one},
      {"beta2", &O::beta2, "t", "AdamW's decay of the second moment", 0, below_one},
      {"eps", &O::eps, "t", "AdamW's epsilon", 1e-30},
      {"weight_decay", &O::weight_decay, "t", "of matrices"},
      {"clip_norm", &O::clip_norm, "t", "largest gradient norm; 0: no clipping"},
      {"max_bad_steps", &O::max_bad_steps, "t", "non-finite steps in a row that end the run", 1, counts},
    });
    add("Evaluation, samples and checkpoints", {
      {"eval_every", &O::eval_every, "t", "steps between evaluations; 0: none", 0, counts},
      {"eval_rows", &O::eval_rows, "te", "rows of seq_len tokens that an evaluation takes; 0: all of the split", 0, counts},
      {"sample_every", &O::sample_every, "t", "steps between samples; 0: none", 0, counts},
      {"sample_prompt", &O::sample_prompt, "t", "what samples continue"},
      {"sample_tokens", &O::sample_tokens, "t", "tokens of a sample", 1, counts},
      {"save_every", &O::save_every, "t", "steps between checkpoints; 0: at the end alone", 0, counts},
      {"keep_last", &O::keep_last, "t", "newest checkpoints to keep", 1, counts},
      {"keep_every", &O::keep_every, "t", "also keep checkpoints of multiples of these steps; 0: none", 0, counts},
      {"max_minutes", &O::max_minutes, "t", "save and exit 75 after these minutes; 0: no limit"},
      {"log_every", &O::log_every, "t", "steps between progress lines where there is no terminal", 1, counts},
      {"stop_after", &O::stop_after, "t", "save and exit 75 after these steps of this session; 0: no limit", 0, counts},
    });
    add("Data", {
      {"input", &O::input, "P", "files, directories, or JSON lines (*.jsonl)"},
      {"pattern", &O::pattern, "p", "names of files to take from directories, such as *.py"},
      {"out", &O::out, "PXR", "directory (gradients: file) to write"},
      {"tokenizer", &O::tokenizer, "p", "sentencepiece model to use; empty: train one"},
      {"tokenizer_mb", &O::tokenizer_mb, "p", "MB of text that one is trained on: whole documents that the seed chooses", 1, 1 << 20},
      {"val_share", &O::val_share, "p", "share of documents held out", 0, below_one},
      {"fim_rate", &O::fim_rate, "p", "share of documents rearranged for filling in", 0, 1},
      {"fim_bytes", &O::fim_bytes, "p", "rearranged in pieces of so many bytes and the rest of a line; 0: whole", 0, counts},
      {"fim_spm_rate", &O::fim_spm_rate, "p", "share of those in suffix-prefix-middle order", 0, 1},
      {"shard_tokens", &O::shard_tokens, "p", "tokens of a shard file", 1024, counts},
      {"split", &O::split, "e", "which documents to evaluate", 0, 0, "train|val"},
      {"batch", &O::batch, "Rv", "safetensors file of input_ids and labels [rows, T]"},
      {"against", &O::against, "v", "safetensors file of gradients that another trainer wrote"},
      {"logits", &O::logits, "r", "write logits [rows, T, vocab_size] too, found by cached decoding"},
    });
    add("Text", {
      {"prompt", &O::prompt, "g", "text to continue"},
      {"prompt_file", &O::prompt_file, "g", "file with the text to continue"},
      {"infill", &O::infill, "g", "fill in between the prompt and the suffix"},
      {"suffix", &O::suffix, "g", "text after the hole"},
      {"max_new_tokens", &O::max_new_tokens, "g", "tokens to write at most", 1, counts},
      {"temperature", &O::temperature, "g", "0: always the likeliest token", 0, 100},
      {"top_k", &O::top_k, "g", "choose among the k likeliest tokens; 0: all", 0, counts},
      {"top_p", &O::top_p, "g", "choose among the likeliest tokens of this total probability", 1e-6, 1},
    });
    return all;
  }();
  return table;
}
// clang-format on

}  // namespace onescale

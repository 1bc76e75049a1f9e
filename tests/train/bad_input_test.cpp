// Bad input to the program itself: each case ends with exit code 2 (usage) or 1, exactly one sentence on standard error
// with the value, the place and the fix, and nothing that existed before is changed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "parallel/file.h"
#include "tests/temp_dir.h"

namespace onescale {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Outcome {
  int code = -1;
  std::string out, error;
};

struct Case {
  const char* name;
  Words words;
  int code;
  Words parts;                          // of the sentence
  rlim_t largest_file = RLIM_INFINITY;  // stands for a full disk: writing beyond it fails
};

// A prepared corpus, a trained run and a Hugging Face model, made once.
class BadInput : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TempDir;  // NOLINT: lives until TearDownTestSuite
    fs::create_directories(at("corpus"));
    for (int i = 0; i < 40; ++i) {
      std::string text;
      for (int j = 0; j < 12; ++j) {
        text += "def f" + std::to_string(i * j) + "(x, y):\n    return x * " + std::to_string(i + j) + " + y[" +
                std::to_string(j) + "]\n\n";
      }
      write("corpus/" + std::to_string(i) + ".py", text);
    }
    write("base.toml",
          "n_positions = 16\nn_embd = 8\nn_head = 2\nn_layer = 1\nglobal_batch = 4\nmicro_batch = 2\nsteps = "
          "2\neval_rows = 2\n");
    must({"prepare", "--input", at("corpus"), "--out", at("data"), "--vocab_size", "300", "--val_share", "0.2"});
    must(train("run"));
    fs::copy(fs::path(FIXTURES) / "golden/mqa", at("hf"), fs::copy_options::recursive);
  }
  static void TearDownTestSuite() { delete dir_; }

  static std::string at(const std::string& name) { return *dir_ / name; }
  static std::string write(const std::string& name, const std::string& text) {
    fs::create_directories(fs::path(at(name)).parent_path());
    std::ofstream(at(name), std::ios::binary) << text;
    return at(name);
  }
  // A model directory like hf, but with another model.safetensors.
  static std::string model_with(const std::string& name, const std::string& file) {
    fs::create_directories(at(name));
    fs::copy_file(at("hf/config.json"), at(name + "/config.json"), fs::copy_options::overwrite_existing);
    write(name + "/model.safetensors", file);
    return at(name);
  }
  static std::string safetensors(const std::string& header, std::size_t data) {
    const auto length = static_cast<std::uint64_t>(header.size());
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + std::string(data, '\0');
  }
  static Words train(const std::string& run, const Words& more = {}) {
    return Words{"train", "--config", at("base.toml"), "--data", at("data"), "--run_dir", at(run)} + more;
  }

  static Outcome run(const Words& words, rlim_t largest_file = RLIM_INFINITY) {
    const std::string out = at("stdout"), error = at("stderr");
    const pid_t child = fork();
    if (child == 0) {
      std::vector<char*> argv = {const_cast<char*>("onescale")};
      for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
      argv.push_back(nullptr);
      dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644), STDOUT_FILENO);
      dup2(open(error.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644), STDERR_FILENO);
      const rlimit limit = {largest_file, largest_file};
      setrlimit(RLIMIT_FSIZE, &limit);
      execv(ONESCALE, argv.data());
      _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_text(out), read_text(error)};
  }
  static void must(const Words& words) {
    const Outcome outcome = run(words);
    ASSERT_EQ(outcome.code, 0) << words[0] << ": " << outcome.error << outcome.out;
  }
  // Everything that a failure must leave alone.
  static std::map<std::string, std::string> kept() {
    std::map<std::string, std::string> files;
    for (const char* top : {"corpus", "data", "run", "hf"}) {
      for (const auto& entry : fs::recursive_directory_iterator(at(top))) {
        if (entry.is_regular_file() && entry.path().filename() != "log.txt")
          files[entry.path().string()] = read_text(entry.path().string());
      }
    }
    return files;
  }
  static void check_cases(const std::vector<Case>& cases) {
    const auto before = kept();
    for (const Case& c : cases) {
      SCOPED_TRACE(c.name);
      const Outcome outcome = run(c.words, c.largest_file);
      EXPECT_EQ(outcome.code, c.code) << outcome.error << outcome.out;
      EXPECT_TRUE(outcome.error.starts_with("onescale: ")) << outcome.error;
      EXPECT_EQ(std::count(outcome.error.begin(), outcome.error.end(), '\n'), 1) << outcome.error;
      EXPECT_GT(outcome.error.size(), 40u) << outcome.error;
      EXPECT_LE(outcome.error.size(), 411u) << outcome.error;  // 400, "onescale: " and the newline
      for (const std::string& part : c.parts)
        EXPECT_NE(outcome.error.find(part), std::string::npos) << part << "\n" << outcome.error;
      EXPECT_TRUE(kept() == before);
    }
  }

  static TempDir* dir_;
};
TempDir* BadInput::dir_ = nullptr;

TEST_F(BadInput, Options) {
  const std::string key = write("key.toml", "lr = 1e-3\nn_layr = 2\n"),
                    type = write("type.toml", "\nsteps = \"many\"\n"), syntax = write("syntax.toml", "steps\n");
  check_cases({
      {"command", {"trainn"}, 2, {"'trainn'", "train"}},
      {"option", train("x", {"--n_embed", "8"}), 2, {"--n_embed", "--n_embd"}},
      {"option of another command", train("x", {"--top_k", "8"}), 2, {"--top_k", "train", "leave it out"}},
      {"option missing", {"train", "--data", at("data")}, 2, {"run_dir", "--run_dir"}},
      {"value missing", train("x", {"--lr"}), 2, {"--lr", "no value"}},
      {"type", train("x", {"--lr", "fast"}), 2, {"lr", "'fast'", "number", "command line"}},
      {"range", train("x", {"--steps", "-3"}), 2, {"steps", "'-3'", ">= 1"}},
      {"absurd number",
       {"generate", "--model", at("hf"), "--max_new_tokens", "9000000000000000000"},
       2,
       {"max_new_tokens", "9000000000000000000", "<= 1e+12"}},
      {"choice", train("x", {"--schedule", "cosin"}), 2, {"schedule", "'cosin'", "cosine|linear"}},
      {"key of a file", train("x", {"--config", key}), 2, {key + ":2", "'n_layr'", "n_layer"}},
      {"type in a file", train("x", {"--config", type}), 2, {type + ":2", "steps", "\"many\"", "without quotes"}},
      {"syntax of a file", train("x", {"--config", syntax}), 2, {syntax + ":1", "'steps'", "name = value"}},
      {"file missing", train("x", {"--config", at("none.toml")}), 2, {at("none.toml"), "cannot be read"}},
      {"device", train("x", {"--device", "cuda"}), 2, {"cuda", "--device cpu"}},
  });
  EXPECT_FALSE(fs::exists(at("x")));
}

TEST_F(BadInput, Sizes) {
  check_cases({
      {"T over n_positions", train("x", {"--seq_len", "17"}), 2, {"seq_len", "17", "n_positions", "16"}},
      {"heads", train("x", {"--n_embd", "48", "--n_head", "5"}), 2, {"n_head", "5", "48", "4 and 6"}},
      {"micro-batch",
       train("x", {"--global_batch", "12", "--micro_batch", "5"}),
       2,
       {"micro_batch", "5", "12", "4, 6"}},
      {"sample_prompt over n_positions",
       train("x", {"--sample_every", "1", "--sample_prompt", std::string(99, '7')}),
       2,
       {"sample_prompt", "n_positions", "16", "shorten it"}},
      {"vocabulary", train("x", {"--vocab_size", "100"}), 2, {"vocab_size", "100", "300"}},
      {"fewer tokens than a batch",
       train("x", {"--global_batch", "100000", "--micro_batch", "10"}),
       1,
       {"data", "100000"}},
      {"model of another vocabulary",
       {"train", "--data", at("data"), "--run_dir", at("x"), "--model", at("hf"), "--global_batch", "8"},
       2,
       {"300", "99", "vocab_size"}},
  });
}

TEST_F(BadInput, Data) {
  fs::create_directories(at("empty"));
  fs::copy(at("data"), at("cut"));
  fs::resize_file(at("cut/train_000000.bin"), fs::file_size(at("cut/train_000000.bin")) - 3);
  fs::copy(at("data"), at("mixed"));
  must({"prepare", "--input", at("corpus/1.py"), at("corpus/2.py"), at("corpus/3.py"), "--out", at("other"),
        "--vocab_size", "290", "--val_share", "0.4"});
  fs::copy_file(at("other/tokenizer.model"), at("mixed/tokenizer.model"), fs::copy_options::overwrite_existing);
  write("asked.jsonl", R"({"prompt": "a b c d e f g h i j k l m n o p q r s t u v w x y z", "completion": "a"})"
                       "\n"
                       R"({"prompt": "z y x w v u t s r q p o n m l k j i h g f e d c b a", "completion": "z"})");
  must({"prepare", "--input", at("asked.jsonl"), at("asked.jsonl"), at("asked.jsonl"), "--out", at("ignored"),
        "--tokenizer", at("data/tokenizer.model"), "--val_share", "0.4"});
  for (const char* split : {"train", "val"}) {
    const std::string mask = str("ignored/", split, "_000000.mask");
    write(mask, std::string(fs::file_size(at(mask)), '\xff'));
  }
  const std::string lines = write("lines.jsonl", "{\"text\": \"a\"}\n{\"text\": \"b\",}\n"),
                    field = write("field.jsonl", "{\"text\": \"a\"}\n\n{\"txt\": \"b\"}\n"),
                    empty = write("empty.py", ""), one = write("one.py", "x = 1\n");
  const auto prepare = [&](const std::string& input) {
    return Words{"prepare", "--input", input, "--out", at("p"), "--vocab_size", "300"};
  };
  const auto train_on = [&](const std::string& data) {
    Words words = train("x");
    words[4] = at(data);
    return words;
  };
  Words skipped = train("skipped");
  skipped[4] = at("ignored");
  check_cases({
      {"JSON line", prepare(lines), 1, {lines, "line 2", "column"}},
      {"JSON line without text", prepare(field), 1, {field, "line 3", "text"}},
      {"no text", prepare(empty), 2, {empty, "bytes"}},
      {"no input", prepare(at("none")), 2, {at("none"), "does not exist"}},
      {"vocabulary too large", prepare(one), 2, {"vocab_size", "300"}},
      {"tokenizer", prepare(at("corpus")) + Words{"--tokenizer", one}, 1, {one}},
      {"other settings",
       {"prepare", "--input", at("corpus"), "--out", at("data"), "--vocab_size", "321"},
       2,
       {at("data"), "300", "321"}},
      {"place", {"prepare", "--input", at("corpus"), "--out", at("run")}, 2, {at("run"), "another directory"}},
      {"directory without shards", train_on("empty"), 2, {at("empty")}},
      {"no data", train_on("none"), 2, {at("none")}},
      {"truncated shard", train_on("cut"), 1, {"cut/train_000000.bin", "bytes"}},
      {"tokenizer of other data", train_on("mixed"), 1, {"mixed/train_000000.bin", "tokenizer"}},
      {"data of another tokenizer than the model's",
       {"train", "--data", at("other"), "--run_dir", at("x"), "--model", at("run"), "--global_batch", "8"},
       2,
       {at("other"), at("run"), "--tokenizer"}},
      {"evaluation without a target",
       {"eval", "--data", at("ignored"), "--model", at("run")},
       1,
       {at("ignored"), "no target"}},
      {"training without a target", skipped, 1, {"every one of the 2 steps was skipped", at("skipped")}},
      {"and again", skipped, 1, {"every one of the 2 steps was skipped", at("skipped")}},
  });
}

TEST_F(BadInput, Models) {
  const std::string absurd = std::string(7, '\xff') + "\x7f" + "{}", whole = read_text(at("hf/model.safetensors"));
  const std::string overlap = safetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                          R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                                          12);
  const auto eval = [&](const std::string& model) { return Words{"eval", "--data", at("data"), "--model", model}; };
  const auto gradients = [&](const std::string& model, const std::string& rows) {
    return Words{"gradients", "--model", model, "--batch", rows, "--out", at("g")};
  };
  const std::string nan = at("nan"), weights = read_text(at("run/checkpoints/step-00000002/model.safetensors"));
  fs::copy(at("run/checkpoints/step-00000002"), nan);
  write("nan/model.safetensors", weights.substr(0, weights.size() - 4) + "\xff\xff\xff\xff");
  std::string huge = whole;  // the largest float32 as the last token's embedding
  for (std::size_t i = whole.size() - 4 * 48; i < whole.size(); i += 4) huge.replace(i, 4, "\xff\xff\x7f\x7f");
  model_with("huge", huge);
  const auto rows = [&](const char* name, const std::string& labels) {
    return write(name, safetensors(R"({"input_ids":{"dtype":"I64","shape":[1,2],"data_offsets":[0,16]},)"
                                   R"("labels":{"dtype":"I64","shape":[1,2],"data_offsets":[16,32]}})",
                                   16) +
                           labels);
  };
  const std::string none = "\x9c" + std::string(7, '\xff'), ignored = rows("ignored.safetensors", none + none),
                    good = rows("good.safetensors", std::string(16, '\0')),
                    batch = FIXTURES "/golden/mqa/batch.safetensors";
  write("llama/config.json", R"({"model_type": "llama"})");
  write("json/config.json", "{\n \"model_type\": \"gpt_bigcode\"\n \"n_head\": 4\n}");
  check_cases({
      {"absurd header", eval(model_with("absurd", absurd)), 1, {"absurd/model.safetensors", "header"}},
      {"overlapping ranges", eval(model_with("overlap", overlap)), 1, {"overlap/model.safetensors", "overlap"}},
      {"truncated file",
       eval(model_with("short", whole.substr(0, whole.size() - 5))),
       1,
       {"short/model.safetensors", "truncated"}},
      {"other tensors",
       eval(model_with("a", safetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8))),
       1,
       {at("a"), "missing", "unexpected: a"}},
      {"another model", eval(at("llama")), 2, {"llama/config.json", "llama", "gpt_bigcode"}},
      {"config.json", eval(at("json")), 1, {"json/config.json", "line 3"}},
      {"no model", eval(at("none")), 1, {at("none"), "Hugging Face directory"}},
      {"no prompt_file",
       {"generate", "--model", at("run"), "--prompt_file", at("none")},
       1,
       {at("none"), "check the path"}},
      {"no tokenizer", {"generate", "--model", at("hf"), "--prompt", "a"}, 1, {at("hf"), "tokenizer.model"}},
      {"a weight that is no number", eval(nan), 1, {nan, "transformer.", "nan", "damaged"}},
      {"its training",
       {"train", "--data", at("data"), "--run_dir", at("x"), "--model", nan, "--global_batch", "8"},
       1,
       {nan, "nan"}},
      {"its export", {"export", "--model", nan, "--out", at("x")}, 1, {nan, "nan"}},
      {"its gradients", gradients(nan, good), 1, {nan, "nan"}},
      {"weights without a finite loss", gradients(at("huge"), batch), 1, {batch, "loss", "damaged"}},
      {"a batch without targets", gradients(at("hf"), ignored), 1, {ignored, "every label is -100"}},
      {"no batch", {"gradients", "--model", at("hf"), "--batch", at("none"), "--out", at("g")}, 1, {at("none")}},
  });
}

// Each reader of JSON, given 80,000 brackets in each other, which its own stack would not hold.
TEST_F(BadInput, DeepJson) {
  const std::string deep = std::string(80'000, '[') + std::string(80'000, ']'), said = "nested deeper than 100";
  const auto copy = [](const char* from, const char* to) { fs::copy(at(from), at(to), fs::copy_options::recursive); };
  const auto eval = [&](const std::string& model) { return Words{"eval", "--data", at("data"), "--model", at(model)}; };
  write("deep.jsonl", "{\"text\": \"a\", \"more\": " + deep + "}\n");
  copy("hf", "deep_config");
  write("deep_config/config.json", deep);
  model_with("deep_header", safetensors(deep, 8));
  copy("hf", "deep_index");
  fs::remove(at("deep_index/model.safetensors"));
  write("deep_index/model.safetensors.index.json", deep);
  copy("data", "deep_data");
  write("deep_data/prepare.json", deep);
  copy("run", "deep_metrics");
  write("deep_metrics/metrics.jsonl", deep + "\n");
  copy("run", "deep_trainer");
  write("deep_trainer/checkpoints/step-00000002/trainer.json", deep);
  Words deep_data = train("x");
  deep_data[4] = at("deep_data");
  check_cases({
      {"JSON lines", {"prepare", "--input", at("deep.jsonl"), "--out", at("p")}, 1, {"deep.jsonl line 1", said}},
      {"config.json", eval("deep_config"), 1, {"config.json: line 1, column 101", said}},
      {"safetensors header", eval("deep_header"), 1, {"model.safetensors, header: line 1, column 101", said}},
      {"safetensors index", eval("deep_index"), 1, {"index.json: line 1, column 101", said}},
      {"prepare.json", deep_data, 1, {"prepare.json: line 1, column 101", said}},
      {"metrics.jsonl", train("deep_metrics", {"--steps", "3"}), 1, {"metrics.jsonl:1: line 1, column 101", said}},
      {"trainer.json", train("deep_trainer", {"--steps", "3"}), 1, {"trainer.json: line 1, column 101", said}},
  });
}

TEST_F(BadInput, LongValues) {
  const std::string name(5000, 'n'), value(100'000, 'v');
  write("long.jsonl", "{\"" + value + value + "\": \"" + value + "\"}\n");
  write("long.toml", value + " = 1\n");
  check_cases({
      {"option", train("x", {"--" + value, "1"}), 2, {"--vvv", "vvv: did you mean"}},
      {"value", train("x", {"--lr", value}), 2, {"lr is 'vvv", "vvv': give a number"}},
      {"word", train("x", {value}), 2, {"'vvv", "vvv' belongs to no option"}},
      {"lines in a value", train("x", {"--lr", "1\n2"}), 2, {"lr is '1?2'"}},
      {"key of a file", train("x", {"--config", at("long.toml")}), 2, {"long.toml:1: unknown option 'vvv"}},
      {"JSON key", {"prepare", "--input", at("long.jsonl"), "--out", at("p")}, 1, {"line 1", "\"text\""}},
      {"path", {"prepare", "--input", at(name), "--out", at("p")}, 2, {"/nnn", "nnn: the input does not exist"}},
      {"path of a run", train(name), 1, {"run_dir /", "check the path and its rights"}},
      {"path of a model",
       {"eval", "--model", at(name), "--data", at("data")},
       1,
       {"/nnn", "nnn: File name too long; check the path"}},
  });
}

TEST_F(BadInput, RunDirectories) {
  write("full/file", "x");
  const Words export_run = {"export", "--model", at("run"), "--out"};
  check_cases({
      {"unwritable", train("corpus/1.py/run"), 1, {at("corpus/1.py/run")}},
      {"a name that no file can have", train(std::string(300, 'x')), 1, {"xxx: ", "check the path"}},
      {"a file", train("corpus/1.py"), 2, {at("corpus/1.py"), "not a directory"}},
      {"not a run", train("full"), 2, {at("full"), "new directory"}},
      {"other sizes", train("run", {"--n_layer", "2"}), 2, {at("run"), "n_layer = 1", "another run_dir"}},
      {"other seed", train("run", {"--seed", "2"}), 2, {at("run"), "seed = 1", "2"}},
      {"export to a place that is taken", export_run + Words{at("hf")}, 2, {at("hf"), "exists"}},
      {"no space for the last checkpoint", train("nospace"), 1, {"saved"}, 4096},
      {"no space for an export", export_run + Words{at("e")}, 1, {at("e")}, 1024},
      {"no space for shards",
       {"prepare", "--input", at("corpus"), "--out", at("p"), "--vocab_size", "300"},
       1,
       {at("p")},
       1024},
  });
  EXPECT_FALSE(fs::exists(at("e")));
  EXPECT_FALSE(fs::exists(at("p")));
}

TEST_F(BadInput, CheckpointsThatWereDamaged) {
  must(train("damaged", {"--save_every", "1"}));
  const fs::path checkpoint = fs::path(at("damaged")) / "checkpoints/step-00000002/model.safetensors";
  std::fstream file(checkpoint, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end);
  file.put('\x55');
  file.close();
  const Outcome older = run({"eval", "--data", at("data"), "--model", at("damaged")});
  EXPECT_EQ(older.code, 0);
  EXPECT_NE(older.error.find("step-00000001 is used instead"), std::string::npos) << older.error;
  fs::remove_all(at("damaged/checkpoints/step-00000001"));
  check_cases(
      {{"all checkpoints damaged", train("damaged", {"--steps", "3"}), 1, {"step-00000002", "model.safetensors"}}});
}

}  // namespace
}  // namespace onescale

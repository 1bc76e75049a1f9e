// The files of configs/: published sizes, and every model with every layout, which fits or says what does not.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "kernels/error.h"
#include "train/layout_check.h"
#include "train/options.h"
#include "train/session.h"

namespace onescale {
namespace {

const std::string configs = FIXTURES "/../../configs/";

std::vector<std::string> names(const std::string& folder) {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(configs + folder)) out.push_back(entry.path().stem());
  std::sort(out.begin(), out.end());
  return out;
}
std::string model_file(const std::string& name) {
  return configs + "models/" + name + ".toml";
}
std::string layout_file(const std::string& name) {
  return configs + "layouts/" + name + ".toml";
}

Parsed resolve(const std::vector<std::string>& files, const std::vector<std::string>& more = {}) {
  std::vector<const char*> argv = {"onescale", "plan"};
  for (const std::string& file : files) argv.insert(argv.end(), {"--config", file.c_str()});
  for (const std::string& word : more) argv.push_back(word.c_str());
  return parse(static_cast<int>(argv.size()), argv.data());
}

// What refuses these options, or nothing.
std::string refused(const Options& o) {
  try {
    const ModelConfig config = config_from_options(o, 0);
    const Layout layout = make_layout(static_cast<int>(o.world), 0, static_cast<int>(o.sp), static_cast<int>(o.tp));
    check_layout(config, o.seq_len, layout, o.sp_mode);
    check_batch(o.global_batch, o.micro_batch, layout);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

// Sizes from the published config.json files, counted with the formula of the architecture; rates, rows and steps from
// the papers and scripts of the runs.
TEST(Configs, PublishedSizesAndRecipes) {
  struct Published {
    std::int64_t parameters;
    double lr, min_lr;
    std::int64_t global_batch, seq_len, warmup_steps, steps;
  };
  const std::map<std::string, Published> published = {
      {"tiny_starcoder_py", {164'144'128, 4e-4, 4e-5, 256, 8192, 2000, 50'000}},
      {"santacoder", {1'124'886'528, 2e-4, 0, 192, 2048, 12'000, 600'000}},
      {"starcoderbase_1b", {1'137'207'296, 4e-4, 4e-5, 128, 8192, 2000, 1'000'000}},
      {"starcoderbase_3b", {3'043'311'104, 5e-4, 5e-5, 256, 8192, 2000, 500'000}},
      {"starcoderbase_7b", {7'327'263'232, 3e-4, 3e-5, 512, 8192, 2000, 250'000}},
      {"starcoderbase", {15'517'456'384, 3e-4, 3e-5, 512, 8192, 2000, 250'000}},
      {"granite_20b", {20'066'993'152, 3e-4, 3e-5, 512, 8192, 2000, 715'000}},
      {"granite_34b", {33'715'603'456, 3e-4, 3e-5, 512, 8192, 2000, 334'000}},
      {"gpt2_124m", {124'439'808, 6e-4, 0, 512, 1024, 700, 19'560}},
      {"cpu_4m", {3'813'120, 3e-3, 3e-4, 16, 256, 50, 800}},
      {"cpu_21m", {20'613'888, 1e-3, 1e-4, 32, 512, 200, 10'000}}};
  EXPECT_EQ(names("models").size(), published.size());
  for (const auto& [name, p] : published) {
    SCOPED_TRACE(name);
    const std::string file = model_file(name);
    const char* train[] = {"onescale", "train", "--run_dir", "r", "--data", "d", "--config", file.c_str()};
    const Options o = parse(8, train).options;
    EXPECT_EQ(config_from_options(o, 0).parameters(), p.parameters);
    EXPECT_EQ(o.lr, p.lr);
    EXPECT_EQ(o.min_lr, p.min_lr);
    EXPECT_EQ(o.global_batch, p.global_batch);
    EXPECT_EQ(o.seq_len, p.seq_len);
    EXPECT_EQ(o.warmup_steps, p.warmup_steps);
    EXPECT_EQ(o.steps, p.steps);
    EXPECT_EQ(o.beta1, 0.9);
    EXPECT_EQ(o.beta2, 0.95);
    EXPECT_EQ(o.weight_decay, 0.1);
    EXPECT_EQ(o.clip_norm, 1.0);
    const bool small = name.starts_with("cpu") || name == "gpt2_124m";
    EXPECT_EQ(o.attn_pdrop, small ? 0.0 : 0.1);
    EXPECT_EQ(o.attn_pdrop, o.resid_pdrop);
    EXPECT_EQ(o.attn_pdrop, o.embd_pdrop);
  }
}

TEST(Configs, EveryModelFitsEveryLayoutOrSaysWhyNot) {
  const std::string twelve = "n_head is 12, which tp 8 does not divide; tp may be 1, 2, 3, 4, 6 or 12",
                    twelve_sp8 =
                        "n_head is 12, which sp 8 does not divide; sp may be 1, 2, 3, 4, 6 or 12, or sp_mode gather_kv "
                        "takes any number of heads",
                    twelve_both =
                        "n_head is 12, which sp 2 * tp 4 = 8 does not divide; with tp 4, sp may be 1 or 3, or sp_mode "
                        "gather_kv takes any number of heads",
                    eight =
                        "n_head is 8, which sp 2 * tp 8 = 16 does not divide; with tp 8, sp may be 1, or sp_mode "
                        "gather_kv takes any number of heads";
  const auto tp_of_22 = [](int tp) {
    return str("n_head is 22, which tp ", tp, " does not divide; tp may be 1, 2, 11 or 22");
  };
  const auto sp_of_22 = [](int sp) {
    return str("n_head is 22, which sp ", sp,
               " does not divide; sp may be 1, 2, 11 or 22, or sp_mode gather_kv takes any number of heads");
  };
  const auto rows = [](int global_batch, const char* nearest) {
    return str("global_batch is ", global_batch, ", no multiple of dp 128; the nearest that ", nearest);
  };
  const std::map<std::string, std::string> expected = {
      {"tiny_starcoder_py sp8", twelve_sp8},
      {"tiny_starcoder_py tp8", twelve},
      {"tiny_starcoder_py nodes8_tp4_sp2_zero2", twelve_both},
      {"tiny_starcoder_py nodes64_tp8_sp2_zero3", twelve},
      {"gpt2_124m sp8", twelve_sp8},
      {"gpt2_124m tp8", twelve},
      {"gpt2_124m nodes8_tp4_sp2_zero2", twelve_both},
      {"gpt2_124m nodes64_tp8_sp2_zero3", twelve},
      {"cpu_4m nodes64_tp8_sp2_zero3", eight},
      {"cpu_4m nodes64_tp4_zero1", rows(16, "fits is 128")},
      {"cpu_21m nodes64_tp8_sp2_zero3", eight},
      {"cpu_21m nodes64_tp4_zero1", rows(32, "fits is 128")},
      {"santacoder nodes64_tp4_zero1", rows(192, "fit are 128 and 256")},
      {"starcoderbase_3b sp4", sp_of_22(4)},
      {"starcoderbase_3b sp8", sp_of_22(8)},
      {"starcoderbase_3b tp4", tp_of_22(4)},
      {"starcoderbase_3b tp8", tp_of_22(8)},
      {"starcoderbase_3b tp2_sp2_zero3",
       "n_head is 22, which sp 2 * tp 2 = 4 does not divide; with tp 2, sp may be 1 or 11, or sp_mode gather_kv takes "
       "any number of heads"},
      {"starcoderbase_3b nodes8_tp4_sp2_zero2", tp_of_22(4)},
      {"starcoderbase_3b nodes64_tp4_zero1", tp_of_22(4)},
      {"starcoderbase_3b nodes64_tp8_sp2_zero3", tp_of_22(8)}};
  std::size_t misfits = 0;
  for (const std::string& model : names("models")) {
    for (const std::string& layout : names("layouts")) {
      const Parsed both = resolve({model_file(model), layout_file(layout)});
      const auto found = expected.find(str(model, " ", layout));
      EXPECT_EQ(refused(both.options), found == expected.end() ? "" : found->second) << model << " " << layout;
      misfits += found != expected.end();
    }
  }
  EXPECT_EQ(misfits, expected.size());
}

// A layout sets no option of a model file and the other way round: their order does not matter.
TEST(Configs, ModelsAndLayoutsCompose) {
  for (const std::string& model : names("models")) {
    for (const std::string& layout : names("layouts")) {
      const std::string a = resolve({model_file(model), layout_file(layout)}, {"--print_config"}).text;
      EXPECT_EQ(a, resolve({layout_file(layout), model_file(model)}, {"--print_config"}).text);
    }
  }
  const Options o = resolve({model_file("starcoderbase_1b"), layout_file("tp2_sp2_zero3")}).options;
  EXPECT_EQ(o.n_embd, 2048);
  EXPECT_EQ(o.tp, 2);
  EXPECT_EQ(o.sp, 2);
  EXPECT_EQ(o.zero, 3);
  EXPECT_EQ(o.world, 8);
  // 22 heads over 8 sequence-parallel ranks, which ulysses cannot do.
  EXPECT_EQ(refused(resolve({model_file("starcoderbase_3b"), layout_file("sp8"), layout_file("gather_kv")}).options),
            "");
}

}  // namespace
}  // namespace onescale

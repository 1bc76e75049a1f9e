// The command line and configuration files: precedence, round trip, and one sentence for each mistake.
#include "train/options.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

#include "tests/temp_dir.h"

namespace onescale {
namespace {

class OptionsTest : public testing::Test {
 protected:
  std::string file(const std::string& name, const std::string& text) {
    std::ofstream(dir_ / name) << text;
    return dir_ / name;
  }
  static Parsed run(const std::vector<std::string>& words) {
    std::vector<const char*> argv = {"onescale"};
    for (const std::string& word : words) argv.push_back(word.c_str());
    return parse(static_cast<int>(argv.size()), argv.data());
  }
  static Options train(std::vector<std::string> words) {
    const bool data = std::find(words.begin(), words.end(), "--data") != words.end();
    if (!data) words.insert(words.begin(), {"--data", "d"});
    words.insert(words.begin(), {"train", "--run_dir", "r"});
    return run(words).options;
  }
  static std::string error(const std::vector<std::string>& words) {
    try {
      run(words);
    } catch (const UsageError& e) {
      return e.what();
    }
    return "no error";
  }
  // The error of a training run whose configuration file has this text, without the directory of the file.
  std::string file_error(const std::string& text) {
    const std::string message = error({"train", "--run_dir", "r", "--data", "d", "--config", file("c.toml", text)});
    return message.starts_with(dir_ / "") ? message.substr(dir_.path().size() + 1) : message;
  }

  const TempDir dir_;
};

TEST_F(OptionsTest, TableIsConsistent) {
  std::set<std::string> names;
  for (const Option& option : option_table()) {
    EXPECT_TRUE(names.insert(option.name).second) << option.name;
    EXPECT_EQ(find_option(option.name), &option);
    // Every default of every command can be written and read back.
    for (const Command& command : commands()) {
      Options options = defaults(command);
      const std::string text = text_of(options, option, false);
      if (text.starts_with('[')) continue;
      EXPECT_NO_THROW(set_option(options, option, {text}, "default")) << command.name << " " << option.name;
      EXPECT_EQ(text_of(options, option, false), text);
    }
  }
  EXPECT_EQ(find_option("nothing"), nullptr);
}

TEST_F(OptionsTest, DefaultsAreThoseOfTheMembers) {
  const Options options = train({});
  EXPECT_EQ(options.n_embd, 768);
  EXPECT_EQ(options.lr, 3e-4);
  EXPECT_TRUE(options.multi_query);
  EXPECT_EQ(options.given, (std::vector<std::string>{"data", "run_dir"}));
}

TEST_F(OptionsTest, CommandLineWinsOverLaterFileOverEarlierFile) {
  const std::string a = file("a.toml", "lr = 1e-3\nsteps = 10\nseed = 5\n"),
                    b = file("b.toml", "lr = 2e-3\nsteps = 20\n");
  const Options options = train({"--steps", "30", "--config", a, "--config", b});
  EXPECT_EQ(options.seed, 5);
  EXPECT_EQ(options.lr, 2e-3);
  EXPECT_EQ(options.steps, 30);
  EXPECT_TRUE(options.has("seed"));
  EXPECT_FALSE(options.has("beta1"));
}

TEST_F(OptionsTest, ReadsEveryFormOfAValue) {
  const Options options =
      train({"--multi_query=false", "--lr=1", "--scale_attn_weights", "--seed", "1_000", "--sample_prompt", "--x y"});
  EXPECT_FALSE(options.multi_query);
  EXPECT_TRUE(options.scale_attn_weights);
  EXPECT_EQ(options.lr, 1);
  EXPECT_EQ(options.seed, 1000);
  EXPECT_EQ(options.sample_prompt, "--x y");

  const Options lists = run({"prepare", "--out", "o", "--input", "a", "b c", "--input=d", "--fim_rate", "0.5"}).options;
  EXPECT_EQ(lists.input, (std::vector<std::string>{"a", "b c", "d"}));
  EXPECT_EQ(lists.pattern, std::vector<std::string>{"*"});

  EXPECT_TRUE(run({"generate", "--model", "m", "--infill", "--suffix", "s"}).options.infill);
  EXPECT_TRUE(run({"generate", "--model", "m", "--suffix", "s", "--infill"}).options.infill);
  EXPECT_FALSE(run({"generate", "--model", "m", "--infill", "false"}).options.infill);
}

TEST_F(OptionsTest, ReadsToml) {
  const std::string path = file("a.toml",
                                "# a comment\n\n"
                                "  lr=3   # behind a value\r\n"
                                "sample_prompt = \"def f(a, b): # \\\"x\\\"\\n\\tq = 'p' \\\\\"\n"
                                "data = 'C:\\raw'\n"
                                "input = [ \"a b\" , 'c,d', # in an array\n"
                                "  \"e=f\",\n"
                                "]\n"
                                "pattern = []\n"
                                "clip_norm = 1_0.5e-1\n"
                                "multi_query = false\n"
                                "run_dir = \"\\u0041\"\n");
  const Options options = run({"train", "--config", path}).options;
  EXPECT_EQ(options.lr, 3);
  EXPECT_EQ(options.sample_prompt, "def f(a, b): # \"x\"\n\tq = 'p' \\");
  EXPECT_EQ(options.data, "C:\\raw");
  EXPECT_EQ(options.input, (std::vector<std::string>{"a b", "c,d", "e=f"}));  // another command's: read, not used
  EXPECT_FALSE(options.has("input"));
  EXPECT_TRUE(options.pattern.empty());
  EXPECT_EQ(options.clip_norm, 1.05);
  EXPECT_FALSE(options.multi_query);
  EXPECT_EQ(options.run_dir, "A");
}

TEST_F(OptionsTest, ReadsWhatEditorsLeave) {
  for (const char* text :
       {"\xEF\xBB\xBFlr = 3\nsteps = 5", "lr = 3\r\nsteps = 5\r\n", "\xEF\xBB\xBF\r\nlr=3#\n\nsteps = 5#"}) {
    const Options options = train({"--config", file("e.toml", text)});
    EXPECT_EQ(options.lr, 3);
    EXPECT_EQ(options.steps, 5);
  }
  EXPECT_EQ(flat(train({"--config", file("e.toml", "\xEF\xBB\xBF")})), flat(train({})));
}

// Nothing is read in more than linear time, and a sentence shows the ends of what is long: the one 100 MB long took
// more than a minute, the name half of one.
TEST_F(OptionsTest, LongLinesAreReadFastAndShownShortened) {
  const std::string key(1'000'000, 'k'), line(100'000'000, '1');
  const std::clock_t begin = std::clock();
  std::string list = "input = [";
  for (int i = 0; i < 1'000'000; ++i) list += "\"x\", ";
  EXPECT_EQ(run({"prepare", "--out", "o", "--config", file("l.toml", list + "]\n")}).options.input.size(), 1'000'000U);
  const auto ends = [&](const std::string& text, const std::string& first, const std::string& last) {
    const std::string said = file_error(text);
    EXPECT_LE(said.size(), 400U);
    EXPECT_TRUE(said.starts_with(first) && said.ends_with(last)) << said;
  };
  ends(key + " = 1\n", "c.toml:1: unknown option 'kkkkk", "kkkkk': did you mean bucket_mb?");
  ends(key + "\n", "c.toml:1: 'kkkkk", "kkkkk' is not of the form name = value: correct it");
  ends("lr = " + line + "\n", "c.toml:1: lr is '11111", "11111': give a number >= 0, such as 3e-04");
  ends("optimizer = \"" + key + "\"\n", "c.toml:1: optimizer is 'kkkkk", "give one of adamw|sgd, such as adamw");
  EXPECT_LT(static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC, 20);
}

TEST_F(OptionsTest, PrintedConfigurationGivesTheSameRun) {
  const double odd = std::numeric_limits<double>::denorm_min();
  Options options = train(
      {"--sample_prompt", "\"a\"\\b\n\t\x01#[1, 2] = \xc3\xa9 '", "--lr", "0.1", "--beta1", "0.30000000000000004"});
  options.weight_decay = odd;
  const Options again = run({"train", "--config", file("p.toml", print_config(options))}).options;
  EXPECT_EQ(flat(again), flat(options));
  EXPECT_EQ(again.sample_prompt, options.sample_prompt);
  EXPECT_EQ(again.weight_decay, odd);
  EXPECT_EQ(print_config(again), print_config(options));

  const Options lists = run({"prepare", "--out", "o", "--input", "a,b", "c \"d\"", "--pattern", "*.py"}).options;
  const Parsed printed = run({"prepare", "--config", file("q.toml", print_config(lists)), "--print_config"});
  EXPECT_EQ(printed.text, print_config(lists));

  // A model read from a directory has its own sizes: the printed file leaves them out, and is accepted.
  const Options tuned = train({"--model", "m"});
  EXPECT_EQ(flat(run({"train", "--config", file("t.toml", print_config(tuned))}).options), flat(tuned));
}

TEST_F(OptionsTest, EveryPresetIsAccepted) {
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(FIXTURES "/../../configs")) {
    if (entry.path().extension() != ".toml") continue;
    ++files;
    for (const char* command : {"plan", "train"}) {
      EXPECT_NO_THROW(run({command, "--config", entry.path().string(), "--print_config"}));
    }
  }
  EXPECT_GE(files, 3);
}

TEST_F(OptionsTest, HelpVersionAndNoCommand) {
  EXPECT_EQ(run({}).exit_code, 2);
  EXPECT_EQ(run({"--help"}).exit_code, 0);
  EXPECT_NE(run({"--version"}).text.find(version), std::string::npos);
  for (const Command& command : commands()) {
    EXPECT_NE(run({}).text.find(command.name), std::string::npos);
    const std::string text = run({command.name, "--help"}).text;
    for (const Option& option : option_table()) {
      EXPECT_EQ(text.find(std::string("--") + option.name + " ") != std::string::npos, option.belongs(command.letter))
          << command.name << " " << option.name;
    }
  }
}

TEST_F(OptionsTest, OneSentenceOnTheCommandLine) {
  EXPECT_EQ(error({"trian"}),
            "command line: unknown command 'trian': did you mean train (onescale --help lists the commands)?");
  EXPECT_EQ(error({"train", "--learning_rat", "3"}).substr(0, 43), "command line: unknown option --learning_rat");
  EXPECT_EQ(error({"train", "--n_layers=3"}), "command line: unknown option --n_layers: did you mean --n_layer?");
  EXPECT_EQ(error({"train", "--confg", "a"}), "command line: unknown option --confg: did you mean --config?");
  EXPECT_EQ(error({"train", "--top_k", "3"}), "command line: --top_k is no option of onescale train: leave it out");
  EXPECT_EQ(error({"train", "--steps", "1e3"}),
            "command line: steps is '1e3': give a whole number >= 1 and <= 1e+12, such as 1000");
  EXPECT_EQ(error({"train", "--steps", "99999999999999999999"}),
            "command line: steps is '99999999999999999999': give a whole number >= 1 and <= 1e+12, such as 1000");
  EXPECT_EQ(error({"train", "--lr", "fast"}), "command line: lr is 'fast': give a number >= 0, such as 3e-04");
  EXPECT_EQ(error({"train", "--lr", "-1"}), "command line: lr is '-1': give a number >= 0, such as 3e-04");
  EXPECT_EQ(error({"train", "--lr", "nan"}), "command line: lr is 'nan': give a number >= 0, such as 3e-04");
  EXPECT_EQ(error({"train", "--lr", ""}), "command line: lr is '': give a number >= 0, such as 3e-04");
  EXPECT_EQ(error({"train", "--multi_query", "maybe"}),
            "command line: multi_query is 'maybe': give true or false, such as true");
  EXPECT_EQ(error({"train", "--recompute", "block|light"}),
            "command line: recompute is 'block|light': give one of none|light|block, such as none");
  EXPECT_EQ(error({"train", "--lr", "1", "--lr", "2"}), "command line: lr has 2 values: give a number >= 0");
  EXPECT_EQ(error({"train", "--lr"}),
            "command line: --lr has no value: write one behind it (onescale train --help shows which)");
  EXPECT_EQ(error({"train", "more"}),
            "command line: 'more' belongs to no option: write --OPTION VALUE, with quotes around a text");
  EXPECT_EQ(error({"train", "--config", dir_ / "none"}),
            "--config " + dir_ / "none: the file cannot be read: give the path of a TOML file");
  EXPECT_EQ(error({"train", "--config", dir_.path()}),
            "--config " + dir_.path() + ": the file cannot be read: give the path of a TOML file");
}

TEST_F(OptionsTest, OneSentenceWithFileAndLine) {
  EXPECT_EQ(file_error("lr = 1\n\nn_layr = 3\n"), "c.toml:3: unknown option 'n_layr': did you mean n_layer?");
  EXPECT_EQ(file_error("steps = 1.5\n"),
            "c.toml:1: steps is '1.5': give a whole number >= 1 and <= 1e+12, such as 1000");
  EXPECT_EQ(file_error("lr = \"1\"\n"), "c.toml:1: lr is \"1\": write the value without quotes");
  EXPECT_EQ(file_error("optimizer = adamw\n"), "c.toml:1: optimizer is adamw: a text needs quotes around it");
  EXPECT_EQ(file_error("lr = 1\nseed = 2\nlr = 3\n"), "c.toml:3: lr is set in line 1 already: keep one of them");
  EXPECT_EQ(file_error("[train]\nlr = 3\n"),
            "c.toml:1: [train] begins a section, but options are flat: remove the line");
  EXPECT_EQ(file_error("top_k = x\n"), "c.toml:1: top_k is 'x': give a whole number >= 0 and <= 1e+12, such as 0");
  EXPECT_EQ(file_error("lr = [1, 2]\n"), "c.toml:1: lr has 2 values: give a number >= 0");
  EXPECT_EQ(file_error("lr = 1, 2\n"), "c.toml:1: lr has several values: write them between [ and ]");
  EXPECT_EQ(file_error("lr 3\n"), "c.toml:1: 'lr 3' is not of the form name = value: correct it");
  EXPECT_EQ(file_error("lr = 1 2\n"), "c.toml:1: 'lr = 1 2' is not of the form name = value: correct it");
  EXPECT_EQ(file_error("lr =\n"), "c.toml:1: 'lr =' is not of the form name = value: correct it");
  EXPECT_EQ(file_error("= 3\n"), "c.toml:1: '= 3' is not of the form name = value: correct it");
  for (const char* text : {"prompt = \"\"\"abc\"\"\"\n", "input = [\"a\" \"b\"]\n", "prompt = \"a\"b\n"}) {
    EXPECT_NE(file_error(text).find("something beside a text in quotes"), std::string::npos) << text;
  }
  EXPECT_EQ(file_error("prompt = \"abc\n"), "c.toml:1: a string has no closing \": add it");
  EXPECT_EQ(file_error("\ninput = [\"a\",\n\n"), "c.toml:2: an array that begins with [ has no ]: add it");
  EXPECT_EQ(file_error("input = [\"a\"\nlr = 3\n"),
            "c.toml:2: input, whose [ is in line 1, has neither a comma nor a ] here: add it");
  for (const char* text : {"lr = 1e-3]", "input = [\"a\"]]\n", "input = \"a\"]", "lr = ]\n"})
    EXPECT_EQ(file_error(text), "c.toml:1: a ] has no [ before it: remove it") << text;
  EXPECT_EQ(file_error("input = [[\"a\"]]\n"), "c.toml:1: input holds an array in an array: write one list of texts");
  for (const char* text : {"input = [\"a\",,\"b\"]", "input = [,]"})
    EXPECT_EQ(file_error(text), "c.toml:1: a comma in input has no value before it: remove it") << text;
  EXPECT_EQ(file_error("Lr = 3"), "c.toml:1: 'Lr = 3' is not of the form name = value: correct it");
  EXPECT_EQ(
      file_error("prompt = \"\\q\"\n"),
      "c.toml:1: \\q is not an escape that is read here: write \\\\ for a backslash, other characters as they are");
}

TEST_F(OptionsTest, OneSentenceForWhatDoesNotFitTogether) {
  const auto train_error = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"train", "--run_dir", "r", "--data", "d"});
    return error(words);
  };
  EXPECT_EQ(error({"train", "--data", "d"}),
            "train: run_dir is missing (directory of the run: configuration, metrics, log, checkpoints): give "
            "--run_dir on the command line or run_dir = ... in a configuration file");
  EXPECT_NE(error({"prepare", "--out", "o"}).find("input is missing"), std::string::npos);
  EXPECT_EQ(train_error({"--model", "m", "--n_layer", "3"}),
            "train: n_layer is given as well as model m, which has its own: leave one of them out");
  EXPECT_EQ(train_error({"--lr", "1e-6"}), "train: min_lr is 3e-05, above lr 1e-06: lower min_lr or raise lr");
  EXPECT_EQ(train_error({"--schedule", "wsd"}),
            "train: decay_steps is 0: schedule wsd needs 1 to steps - warmup_steps = 900");
  EXPECT_EQ(error({"generate", "--model", "m", "--suffix", "s"}),
            "generate: suffix is given without infill: add --infill to fill in before it");
  EXPECT_EQ(error({"generate", "--model", "m", "--prompt", "s", "--prompt_file", "f"}),
            "generate: prompt is given as well as prompt_file f: leave one of them out");
}

TEST_F(OptionsTest, NearestByEditDistance) {
  EXPECT_EQ(nearest("n_layers", {"n_head", "n_layer", "n_inner"}), "n_layer");
  EXPECT_EQ(nearest("lr", {"beta1", "lr"}), "lr");
  EXPECT_EQ(nearest("kitten", {"sitting", "mitten"}), "mitten");
  EXPECT_EQ(nearest("", {"abc", "a"}), "a");
}

TEST_F(OptionsTest, ListsChanges) {
  const Options before = train({}), now = train({"--lr", "0.001", "--n_layer", "2"});
  EXPECT_TRUE(changed(flat(before), flat(before)).empty());
  Flat old = flat(before);
  old.emplace_back("an_option_of_another_version", "1");
  const std::vector<Change> changes = changed(old, flat(now));
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[0].name, "n_layer");
  EXPECT_EQ(changes[0].before, "12");
  EXPECT_EQ(changes[0].after, "2");
  EXPECT_TRUE(changes[0].fixed);
  EXPECT_EQ(changes[1].name, "lr");
  EXPECT_FALSE(changes[1].fixed);
}

TEST_F(OptionsTest, TwoWaysToWriteADirectoryAreNoChange) {
  const Flat before = flat(train({"--data", "X"}));
  for (const char* same : {"X/", "./X", "X//.", "Y/../X/"})
    EXPECT_TRUE(changed(before, flat(train({"--data", same}))).empty());
  ASSERT_EQ(changed(before, flat(train({"--data", "/X"}))).size(), 1u);
  EXPECT_TRUE(changed(before, flat(train({"--data", std::filesystem::absolute("X")}))).empty());
  std::filesystem::create_directory(dir_ / "real");
  std::filesystem::create_directory_symlink("real", dir_ / "link");
  EXPECT_TRUE(changed(flat(train({"--model", dir_ / "real"})), flat(train({"--model", dir_ / "link/"}))).empty());
  EXPECT_FALSE(changed(before, flat(train({"--data", "/X"})))[0].fixed);  // its hash decides
  EXPECT_EQ(changed(before, flat(train({"--data", "X", "--sample_prompt", "./a"}))).size(), 1u);
}

// A product of two options fits in 64 bits.
TEST_F(OptionsTest, AbsurdNumbersAreRefused) {
  const std::string many = "9000000000000000000";
  EXPECT_EQ(error({"generate", "--model", "m", "--max_new_tokens", many}),
            "command line: max_new_tokens is '" + many + "': give a whole number >= 1 and <= 1e+12, such as 128");
  for (const Option& option : option_table()) {
    if (!option.is<std::int64_t>() || std::string(option.name) == "seed") continue;
    Options options;
    EXPECT_THROW(set_option(options, option, {many}, "x"), UsageError) << option.name;
  }
}

}  // namespace
}  // namespace onescale

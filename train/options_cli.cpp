// The command line and TOML files, on CLI11: the only file that includes it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <set>

#include "kernels/error.h"
#include "parallel/file.h"
#include "train/options.h"

namespace onescale {
namespace {

using Texts = std::vector<std::string>;

Texts names_of(char letter) {  // of one command's options, or (0) of all
  Texts names;
  for (const Option& option : option_table()) {
    if (letter == 0 || option.belongs(letter)) names.emplace_back(option.name);
  }
  return names;
}

// A flat TOML file: name = value, value a string, number, boolean or array of strings. CLI11's reader knows neither
// escapes nor a # inside quotes, and takes quadratic time for an array.
class TomlFile {
 public:
  explicit TomlFile(const std::string& path) : path_(path) {
    std::ifstream in(path, std::ios::binary);
    for (std::string line; std::getline(in, line);) text_ += line + "\n";
    check_usage(in.eof() && !in.bad(), "--config ", path, ": the file cannot be read: give the path of a TOML file");
    if (text_.starts_with(byte_order_mark)) text_.erase(0, byte_order_mark.size());
  }

  void apply(Options& options, std::set<std::string>& given) {
    std::map<std::string, int> seen;
    for (skip(true); at_ < text_.size(); skip(true)) {
      const std::string name = read_word("abcdefghijklmnopqrstuvwxyz0123456789_-", true);
      skip(false);
      if (name.empty() && text_[at_] == '[')
        fail(shown_line(), " begins a section, but options are flat: remove the line");
      if (name.empty() || text_[at_] != '=') malformed();
      ++at_;
      const std::string at = where();
      const auto [first, fresh] = seen.emplace(name, line_);
      if (!fresh) fail(name, " is set in line ", first->second, " already: keep one of them");
      const Option* option = find_option(name);
      if (!option) fail("unknown option '", name, "': did you mean ", nearest(name, names_of(0)), "?");
      set_option(options, *option, read_values(*option), at);
      if (option->belongs(options.letter)) given.insert(name);
    }
  }

 private:
  std::string where() const { return str(path_, ":", line_); }
  template <class... Args>
  [[noreturn]] void fail(const Args&... sentence) const {
    throw UsageError(brief(where(), ": ", sentence...));
  }
  std::string shown_line() const {
    const std::size_t begin = at_ == 0 ? 0 : text_.rfind('\n', at_ - 1) + 1,
                      end = text_.find_last_not_of(" \t\r", text_.find('\n', at_) - 1);
    return text_.substr(begin, end + 1 - begin);
  }
  [[noreturn]] void malformed() const { fail("'", shown_line(), "' is not of the form name = value: correct it"); }

  // To what comes next in the line, or in the lines below it.
  void skip(bool lines) {
    for (;; ++at_) {
      at_ = std::min(text_.find_first_not_of(" \t\r", at_), text_.size());
      if (at_ < text_.size() && text_[at_] == '#') at_ = text_.find('\n', at_);
      if (at_ == text_.size() || text_[at_] != '\n' || !lines) return;
      ++line_;
    }
  }

  // As far as characters are among these, or are not.
  std::string read_word(const char* characters, bool among) {
    const std::size_t begin = at_;
    at_ = among ? text_.find_first_not_of(characters, at_) : text_.find_first_of(characters, at_);
    return text_.substr(begin, at_ - begin);
  }

  // What stands behind name =, to the end of its line or of its array.
  Texts read_values(const Option& option) {
    Texts values;
    skip(false);
    if (text_[at_] != '[') {
      values.push_back(read_value(option));
      if (text_[at_] == ',') fail(option.name, " has several values: write them between [ and ]");
    } else {
      const int begin = line_;
      const auto step = [&](std::size_t characters) {
        at_ += characters;
        skip(true);
        if (at_ < text_.size()) return;
        line_ = begin;
        fail("an array that begins with [ has no ]: add it");
      };
      step(1);
      while (text_[at_] != ']') {
        if (text_[at_] == ',') fail("a comma in ", option.name, " has no value before it: remove it");
        if (text_[at_] == '[') fail(option.name, " holds an array in an array: write one list of texts");
        values.push_back(read_value(option));
        step(0);
        if (text_[at_] == ',')
          step(1);
        else if (text_[at_] != ']')
          fail(option.name, ", whose [ is in line ", begin, ", has neither a comma nor a ] here: add it");
      }
      ++at_, skip(false);
    }
    if (text_[at_] == ']') fail("a ] has no [ before it: remove it");
    if (text_[at_] != '\n') malformed();
    return values;
  }

  std::string read_value(const Option& option) {
    const bool quoted = text_[at_] == '"' || text_[at_] == '\'';
    std::string value = quoted ? read_string() : read_word(" \t\r\n,[]#\"'", false);
    const bool text_wanted = option.is<std::string>() || option.is<Texts>();
    skip(false);
    if (quoted && !std::strchr(",]\n", text_[at_]))
      fail(option.name,
           " has something beside a text in quotes: write each text in one pair of quotes, with commas between");
    if (!quoted && value.empty() && text_[at_] != ']') malformed();
    if (quoted != text_wanted && (quoted || !value.empty()))
      fail(option.name, " is ", quoted ? "\"" : "", value, quoted ? "\"" : "", ": ",
           text_wanted ? "a text needs quotes around it" : "write the value without quotes");
    return value;
  }

  std::string read_string() {
    const char end = text_[at_++];
    std::string out;
    for (; text_[at_] != end; ++at_) {
      if (text_[at_] == '\n') fail("a string has no closing ", end, ": add it");
      if (end == '\'' || text_[at_] != '\\') {
        out += text_[at_];
        continue;
      }
      const char escape = text_[++at_];
      const auto simple = std::string_view("btnfr\"\\").find(escape);
      const std::string hex = escape == 'u' ? text_.substr(at_ + 1, 4) : "";
      if (simple != std::string_view::npos) {
        out += "\b\t\n\f\r\"\\"[simple];
      } else {
        if (hex.size() != 4 || !hex.starts_with("00") ||
            hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos || hex[2] >= '8')
          fail("\\", escape, hex,
               " is not an escape that is read here: write \\\\ for a backslash, other characters as they are");
        out += static_cast<char>(std::stoi(hex, nullptr, 16));
        at_ += 4;
      }
    }
    ++at_;
    return out;
  }

  std::string path_, text_;  // whose last character is a newline
  std::size_t at_ = 0;
  int line_ = 1;
};

std::string main_help() {
  std::string out =
      "onescale trains GPTBigCode (StarCoder-family) language models: text in, Hugging Face checkpoints out.\n\n"
      "Usage: onescale COMMAND [--config FILE ...] [--OPTION VALUE ...]\n\nCommands:\n";
  for (const Command& command : commands())
    out += str("  ", command.name, std::string(12 - std::string(command.name).size(), ' '), command.help, "\n");
  return out +
         "\nonescale COMMAND --help lists a command's options; --print_config prints them with their values as a TOML "
         "file.\n"
         "bash scripts/quickstart.sh shows every step on a small model.\n";
}

}  // namespace

Parsed parse(int argc, const char* const* argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  if (name.empty() || name == "--help" || name == "-h" || name == "help")
    return {{}, main_help(), name.empty() ? 2 : 0};
  if (name == "--version") return {{}, str("onescale ", version, "\n"), 0};
  Texts known;
  for (const Command& c : commands()) known.emplace_back(c.name);
  const auto command =
      std::find_if(commands().begin(), commands().end(), [&](const Command& c) { return c.name == name; });
  check_usage(command != commands().end(), "command line: unknown command '", name, "': did you mean ",
              nearest(name, known), " (onescale --help lists the commands)?");

  Options options = defaults(*command);
  CLI::App app(command->help, "onescale " + name);
  app.set_help_flag("--help,-h", "print this text");
  app.allow_extras();
  app.get_formatter()->column_width(44);
  Texts files;
  app.add_option("--config", files, "TOML files of options; later ones win, the command line wins over all")
      ->type_name("file");
  bool print = false;
  app.add_flag("--print_config", print, "print every option with its value as a TOML file, and end");
  std::vector<std::pair<const Option*, CLI::Option*>> added;
  for (const Option& option : option_table()) {
    if (!option.belongs(command->letter)) continue;
    auto* entry = app.add_option(str("--", option.name), CLI::callback_t([](const CLI::results_t&) { return true; }),
                                 option.help);
    const bool flag = option.is<bool>();
    const std::string type = option.is<std::int64_t>() ? "INT"
                             : option.is<double>()     ? "NUMBER"
                             : flag                    ? "true|false"
                             : *option.choices         ? option.choices
                                                       : "TEXT";
    // Not default_str(): CLI11 would give that to a flag without a value.
    entry->type_name(type + "=" + text_of(options, option, true))->group(std::string(option.group));
    entry->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->expected(flag ? 0 : 1, 1)
        ->allow_extra_args(option.is<Texts>());
    added.emplace_back(&option, entry);
  }
  try {
    app.parse(Texts(std::reverse_iterator(argv + argc), std::reverse_iterator(argv + 2)));
  } catch (const CLI::CallForHelp&) {
    return {options, app.help(), 0};
  } catch (const CLI::ArgumentMismatch& e) {
    const std::string what = e.what();  // "--name: ..."
    throw UsageError(str("command line: ", what.substr(0, what.find(':')),
                         " has no value: write one behind it (onescale ", name, " --help shows which)"));
  } catch (const CLI::ParseError& e) {
    throw UsageError(str("command line: ", e.what(), " (onescale ", name, " --help shows what each option takes)"));
  }
  std::set<std::string> given;
  for (const std::string& file : files) TomlFile(file).apply(options, given);
  for (const auto& [option, entry] : added) {
    if (entry->count() == 0) continue;
    Texts texts = entry->results();
    if (option->is<bool>() && (texts.empty() || texts[0].empty())) texts = {"true"};
    set_option(options, *option, texts, "command line");
    given.insert(option->name);
  }
  for (const std::string& extra : app.remaining()) {
    check_usage(extra.starts_with("--"), "command line: '", extra,
                "' belongs to no option: write --OPTION VALUE, with quotes around a text");
    const std::string unknown = extra.substr(2, extra.find('=') - 2);
    check_usage(!find_option(unknown), "command line: --", unknown, " is no option of onescale ", name,
                ": leave it out");
    Texts names = names_of(command->letter);
    names.insert(names.end(), {"config", "print_config", "help"});
    throw UsageError(
        str("command line: unknown option --", unknown, ": did you mean --", nearest(unknown, names), "?"));
  }
  options.given.assign(given.begin(), given.end());
  if (!print) check_options(options);
  return {options, print ? print_config(options) : "", 0};
}

}  // namespace onescale

// The command line and TOML files, on CLI11: the only file that includes it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "kernels/error.h"
#include "train/options.h"

namespace onescale {
namespace {

using Texts = std::vector<std::string>;

constexpr char string_mark = '\x01';  // marks a string that was taken out of a file

Texts names_of(char letter) {  // of one command's options, or (0) of all
  Texts names;
  for (const Option& option : option_table()) {
    if (letter == 0 || option.belongs(letter)) names.emplace_back(option.name);
  }
  return names;
}

// A flat TOML file: name = value, value a string, number, boolean or array of strings.
class TomlFile {
 public:
  explicit TomlFile(const std::string& path) : path_(path) {
    std::ifstream in(path, std::ios::binary);
    for (std::string line; std::getline(in, line); read_line(line)) ++line_;
    check_usage(in.eof() && !in.bad(), "--config ", path, ": the file cannot be read: give the path of a TOML file");
    check_usage(depth_ == 0, where(), ": an array that begins with [ has no ]: add it");
  }

  // CLI11's reader knows neither escapes nor a # inside quotes nor spaces around commas, so it is given lines without
  // strings, comments and spaces; one item a key comes out, in order.
  void apply(Options& options, std::set<std::string>& given) {
    std::istringstream stripped(stripped_);
    const auto items = CLI::ConfigTOML().from_config(stripped);
    for (std::size_t i = 0; i < items.size(); ++i) {
      const std::string at = str(path_, ":", lines_.at(i)), name = items[i].name;
      const Option* option = find_option(name);
      check_usage(option, at, ": unknown option '", name, "': did you mean ", nearest(name, names_of(0)), "?");
      const bool text_wanted = option->is<std::string>() || option->is<Texts>();
      Texts texts;
      for (const std::string& input : items[i].inputs) {
        const bool quoted = !input.empty() && input[0] == string_mark;
        check_usage(
            !quoted || input.find_first_not_of("0123456789", 1) == std::string::npos, at, ": ", name,
            " has something beside a text in quotes: write each text in one pair of quotes, with commas between");
        texts.push_back(quoted ? strings_.at(std::stoul(input.substr(1))) : input);
        check_usage(quoted == text_wanted, at, ": ", name, " is ", quoted ? "\"" : "", texts.back(), quoted ? "\"" : "",
                    ": ", text_wanted ? "a text needs quotes around it" : "write the value without quotes");
      }
      set_option(options, *option, texts, at);
      if (option->belongs(options.letter)) given.insert(name);
    }
  }

 private:
  std::string where() const { return str(path_, ":", line_); }

  void read_line(const std::string& line) {
    const auto in_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || std::strchr("+-._", c); };
    std::string out;
    for (std::size_t i = 0; i < line.size();) {
      const char before = i > 0 ? line[i - 1] : '=', c = line[i];
      if (c == '#') break;
      if (c == '"' || c == '\'') {
        out += string_mark + std::to_string(strings_.size());
        strings_.push_back(read_string(line, i));
        continue;
      }
      ++i;
      if (c == ' ' || c == '\t' || c == '\r') continue;
      check_usage(static_cast<unsigned char>(c) > ' ', where(), ": a control character outside of quotes: remove it");
      check_usage(
          out.empty() || !std::isspace(static_cast<unsigned char>(before)) || !in_word(out.back()) || !in_word(c),
          where(), ": '", line, "' is not of the form name = value: correct it");
      depth_ += c == '[' && !out.empty() ? 1 : c == ']' ? -1 : 0;
      out += c;
    }
    if (out.empty()) return;
    if (!continued_) {
      check_usage(out[0] != '[', where(), ": ", out, " begins a section, but options are flat: remove the line");
      const std::string name = out.substr(0, out.find('='));
      check_usage(!name.empty() && name.size() + 1 < out.size() &&
                      name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-") == std::string::npos,
                  where(), ": '", line, "' is not of the form name = value: correct it");
      const auto [first, fresh] = seen_.emplace(name, line_);
      check_usage(fresh, where(), ": ", name, " is set in line ", first->second, " already: keep one of them");
      lines_.push_back(line_);
    }
    continued_ = depth_ > 0;
    stripped_ += out + (continued_ ? "" : "\n");
  }

  // The string that begins at line[i]; i moves behind it.
  std::string read_string(const std::string& line, std::size_t& i) {
    const char end = line[i++];
    std::string out;
    for (; i < line.size() && line[i] != end; ++i) {
      if (end == '\'' || line[i] != '\\') {
        out += line[i];
        continue;
      }
      const char escape = ++i < line.size() ? line[i] : ' ';
      const auto simple = std::string_view("btnfr\"\\").find(escape);
      const std::string hex = escape == 'u' ? line.substr(i + 1, 4) : "";
      if (simple != std::string_view::npos) {
        out += "\b\t\n\f\r\"\\"[simple];
      } else {
        check_usage(hex.size() == 4 && hex.starts_with("00") &&
                        hex.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos && hex[2] < '8',
                    where(), ": \\", escape, hex,
                    " is not an escape that is read here: write \\\\ for a backslash, other characters as they are");
        out += static_cast<char>(std::stoi(hex, nullptr, 16));
        i += 4;
      }
    }
    check_usage(i < line.size(), where(), ": a string has no closing ", end, ": add it");
    ++i;
    return out;
  }

  std::string path_, stripped_;
  Texts strings_;
  std::vector<int> lines_;  // where each key stands
  std::map<std::string, int> seen_;
  int line_ = 0, depth_ = 0;
  bool continued_ = false;  // the line before left an array open
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

#include "train/options.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <type_traits>

#include "kernels/error.h"
#include "parallel/file.h"
#include "parallel/json.h"

namespace onescale {
namespace {

using List = std::vector<std::string>;

// Each reads one text into a member; false: it is none of the option's values.
template <class T>
bool read(T& value, std::string text, const Option& option) {
  std::erase(text, '_');  // 1_000_000 as in TOML
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  const auto number = static_cast<double>(value);
  return at == end && error == std::errc() && std::isfinite(number) && number >= option.min && number <= option.max;
}
bool read(bool& value, const std::string& text, const Option&) {
  value = text == "true";
  return value || text == "false";
}
bool read(std::string& value, const std::string& text, const Option& option) {
  value = text;
  const bool one = text.find('|') == std::string::npos;
  return !*option.choices || (one && str("|", option.choices, "|").find("|" + text + "|") != std::string::npos);
}

// Each is the text of a value, as typed or as in TOML.
std::string show(std::int64_t value, bool) {
  return std::to_string(value);
}
std::string show(bool value, bool) {
  return value ? "true" : "false";
}
std::string show(double value, bool toml) {  // the shortest that reads back equal
  std::array<char, 32> buffer;
  const std::string text(buffer.data(), std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr);
  const bool whole = text.find_first_not_of("0123456789") == std::string::npos;
  return toml && whole ? text + ".0" : text;
}
std::string show(const std::string& text, bool toml) {
  Json list = Json::array();  // strings of JSON are TOML's
  list.push(text);
  const std::string quoted = list.dump();
  return toml ? quoted.substr(1, quoted.size() - 2) : text;
}
std::string show(const List& texts, bool) {
  std::string out;
  for (const std::string& text : texts) out += (out.empty() ? "" : ", ") + show(text, true);
  return "[" + out + "]";
}

// "a whole number >= 1", "true or false", ...
std::string expected(const Option& option) {
  if (option.is<bool>()) return "true or false";
  if (option.is<std::string>()) return *option.choices ? str("one of ", option.choices) : "one text";
  return str(option.is<std::int64_t>() ? "a whole number >= " : "a number >= ", show(option.min, false),
             std::isinf(option.max) ? "" : " and <= " + show(option.max, false));
}

// Whether both are one place, now: relative or absolute, through links or not.
bool same_path(const std::string& a, const std::string& b) {
  const auto whole = [](const std::string& path) {
    std::error_code none;
    const std::filesystem::path absolute = std::filesystem::absolute(plain_path(path), none),
                                real = std::filesystem::weakly_canonical(absolute, none);
    return none ? absolute : real;
  };
  return whole(a) == whole(b);
}

// A size's own options are left out where the model's directory decides.
template <class Visit>
void for_each_option(const Options& options, const Visit& visit) {
  for (const Option& option : option_table()) {
    if (option.belongs(options.letter) && (options.model.empty() || option.group != sizes_group)) visit(option);
  }
}

}  // namespace

bool Options::has(const std::string& name) const {
  return std::binary_search(given.begin(), given.end(), name);
}

bool Option::belongs(char letter) const {
  return commands.find(letter) != std::string_view::npos || required(letter);
}

bool Option::required(char letter) const {
  return commands.find(static_cast<char>(std::toupper(letter))) != std::string_view::npos;
}

const Option* find_option(const std::string& name) {
  for (const Option& option : option_table()) {
    if (option.name == name) return &option;
  }
  return nullptr;
}

Options defaults(const Command& command) {
  Options options;
  options.command = command.name;
  options.letter = command.letter;
  if (options.command == "prepare") options.vocab_size = 32768;
  if (options.command == "plan") options.vocab_size = 49152;
  if (options.command == "eval") options.eval_rows = 0;
  if (options.command == "gradients") options.micro_batch = 0;
  return options;
}

void set_option(Options& options, const Option& option, const List& texts, const std::string& where) {
  if (option.is<List>()) {
    options.*std::get<List Options::*>(option.member) = texts;
    return;
  }
  check_usage(texts.size() == 1, where, ": ", option.name, " has ", texts.size(), " values: give ", expected(option));
  const bool ok = std::visit(
      [&](auto member) {
        if constexpr (!std::is_same_v<decltype(member), List Options::*>)
          return read(options.*member, texts[0], option);
        return true;
      },
      option.member);
  check_usage(ok, where, ": ", option.name, " is '", texts[0], "': give ", expected(option), ", such as ",
              text_of({}, option, false));
}

std::string text_of(const Options& options, const Option& option, bool toml) {
  return std::visit([&](auto member) { return show(options.*member, toml); }, option.member);
}

std::string nearest(const std::string& given, const std::vector<std::string>& names) {
  const std::string name = given.substr(0, 100);         // longer than all that are known
  const auto distance = [&](const std::string& other) {  // Levenshtein (1966), one row of the table at a time
    std::vector<std::size_t> row(other.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (std::size_t i = 1; i <= name.size(); ++i) {
      std::size_t diagonal = std::exchange(row[0], i);
      for (std::size_t j = 1; j <= other.size(); ++j) {
        const std::size_t change = diagonal + (name[i - 1] != other[j - 1] ? 1 : 0);
        diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, change}));
      }
    }
    return row.back();
  };
  return *std::min_element(names.begin(), names.end(),
                           [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
}

void check_options(const Options& o) {
  const std::string program = o.command + ": ";
  for (const Option& option : option_table()) {
    const std::string text = text_of(o, option, false);
    check_usage(!option.required(o.letter) || (!text.empty() && text != "[]"), program, option.name, " is missing (",
                option.help, "): give --", option.name, " on the command line or ", option.name,
                " = ... in a configuration file");
    check_usage(o.model.empty() || option.group != sizes_group || !o.has(option.name) || !option.belongs(o.letter),
                program, option.name, " is given as well as model ", o.model,
                ", which has its own: leave one of them out");
  }
  check_usage(o.micro_batch > 0 || o.command == "gradients", program, "micro_batch is 0: give a number >= 1");
  if (o.command == "train") {
    check_usage(o.schedule == "constant" || o.min_lr <= o.lr, program, "min_lr is ", o.min_lr, ", above lr ", o.lr,
                ": lower min_lr or raise lr");
    check_usage(o.schedule != "wsd" || (o.decay_steps > 0 && o.warmup_steps + o.decay_steps <= o.steps), program,
                "decay_steps is ", o.decay_steps,
                ": schedule wsd needs 1 to steps - warmup_steps = ", o.steps - o.warmup_steps);
  }
  if (o.command == "generate") {
    check_usage(o.prompt.empty() || o.prompt_file.empty(), program, "prompt is given as well as prompt_file ",
                o.prompt_file, ": leave one of them out");
    check_usage(o.infill || o.suffix.empty(), program,
                "suffix is given without infill: add --infill to fill in before it");
  }
}

std::string print_config(const Options& options) {
  std::string out = "# onescale " + options.command + "\n", group;
  for_each_option(options, [&](const Option& option) {
    if (group != option.group) out += str("\n# ", group = option.group, "\n");
    out += str(option.name, " = ", text_of(options, option, true), "\n");
  });
  return out;
}

Flat flat(const Options& options) {
  Flat out;
  for_each_option(options,
                  [&](const Option& option) { out.emplace_back(option.name, text_of(options, option, false)); });
  return out;
}

std::vector<Change> changed(const Flat& before, const Flat& now) {
  const std::map<std::string, std::string> old(before.begin(), before.end());
  std::vector<Change> changes;
  for (const auto& [name, value] : now) {
    const auto found = old.find(name);
    const Option* option = find_option(name);
    if (found == old.end() || found->second == value) continue;
    if (option->directory() && same_path(found->second, value)) continue;
    changes.push_back({name, found->second, value, option->fixed()});
  }
  return changes;
}

}  // namespace onescale

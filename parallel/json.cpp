// Json over nlohmann's ordered_json; the only file that includes the library.
#include "parallel/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <utility>

#include "kernels/error.h"
#include "parallel/file.h"

namespace onescale {
namespace {

using Value = nlohmann::ordered_json;

std::string position(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, offset);
  const std::size_t line_start = before.rfind('\n') + 1;  // 0 where there is none
  return str("line ", std::count(before.begin(), before.end(), '\n') + 1, ", column ", offset - line_start + 1);
}

std::string shortened(std::string text) {
  if (text.size() > 160) text.replace(160, std::string::npos, "...");
  return text;
}

// "[json.exception...] parse error at line 1, column 2: <what is wanted>"
std::string detail(const std::string& what) {
  std::size_t begin = what.find("column ");
  begin = begin == std::string::npos ? what.find("] ") : what.find(": ", begin);
  return shortened(begin == std::string::npos ? what : what.substr(begin + 2));
}

// The value as text, made only where a sentence is written.
struct shown {
  explicit shown(const Value& value) : value(value) {}
  const Value& value;
};

std::ostream& operator<<(std::ostream& out, const shown& s) {
  return out << shortened(s.value.dump(-1, ' ', false, Value::error_handler_t::replace));
}

}  // namespace

Json::Json(Value value, const std::string& where)
    : root_(std::make_shared<Value>(std::move(value))), value_(root_.get()), where_(where) {}

Json Json::object(std::initializer_list<std::pair<const char*, Scalar>> fields) {
  Json json{Value::object(), "JSON"};
  for (const auto& [key, value] : fields) json.set(key, value);
  return json;
}

Json Json::array() {
  return {Value::array(), "JSON"};
}

Json Json::parse(std::string_view text, const std::string& where) {
  std::istringstream in{std::string(text)};
  // How far the parser has read; its callbacks carry no position.
  const auto offset = [&] { return static_cast<std::size_t>(in.rdbuf()->pubseekoff(0, std::ios::cur, std::ios::in)); };
  const auto failure = [&](std::size_t at, const std::string& what) {
    return Error(str(where, ": ", position(text, at), ": not valid JSON: ", what, "; correct it"));
  };
  // The keys of every object that is open; nlohmann itself would let a later value replace an earlier one.
  std::vector<std::set<std::string>> open;
  const auto callback = [&](int, Value::parse_event_t event, Value& value) {
    if (event == Value::parse_event_t::object_start) open.emplace_back();
    if (event == Value::parse_event_t::object_end) open.pop_back();
    if (event == Value::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      check(open.back().insert(key).second, where, ": ", position(text, offset()), ": the key \"", shortened(key),
            "\" appears twice in one object; keep one of them");
    }
    return true;
  };
  const std::size_t nul = text.find('\0');  // the library takes one for the end of its input
  if (nul != std::string_view::npos) throw failure(nul, "a NUL byte");
  try {
    return {Value::parse(in, callback), where};
  } catch (const Value::parse_error& e) {
    // e.byte counts from 1 and is the last character read.
    throw failure(e.byte > 0 ? e.byte - 1 : 0, detail(e.what()));
  } catch (const Value::exception& e) {
    throw failure(offset(), detail(e.what()));
  }
}

Json Json::read_file(const std::string& path) {
  return parse(read_text(path), path);
}

bool Json::is_object() const {
  return value_->is_object();
}
bool Json::is_array() const {
  return value_->is_array();
}
bool Json::is_null() const {
  return value_->is_null();
}
bool Json::has(const std::string& key) const {
  return value_->is_object() && value_->contains(key);
}

std::vector<std::string> Json::keys() const {
  check(is_object(), where_, " is ", shown(*value_), ", expected an object");
  std::vector<std::string> names;
  for (const auto& item : value_->items()) names.push_back(item.key());
  return names;
}

std::int64_t Json::size() const {
  return static_cast<std::int64_t>(value_->size());
}

Json Json::at(const std::string& key) const {
  check(is_object(), where_, " is ", shown(*value_), ", expected an object with the key \"", key, "\"");
  const auto found = value_->find(key);
  check(found != value_->end(), where_, " has no key \"", key, "\"");
  Json part = *this;
  part.value_ = &*found;
  part.where_ += (value_ == root_.get() ? ": " : ".") + shortened(key);
  return part;
}

Json Json::at(std::int64_t index) const {
  check(is_array(), where_, " is ", shown(*value_), ", expected an array");
  check(index >= 0 && index < size(), where_, " has ", size(), " elements, none at index ", index);
  Json part = *this;
  part.value_ = &(*value_)[static_cast<std::size_t>(index)];
  part.where_ += str("[", index, "]");
  return part;
}

template <class T>
T Json::get(bool is_one, const char* expected) const {
  check(is_one, where_, " is ", shown(*value_), ", expected ", expected);
  return value_->get<T>();
}

std::string Json::string() const {
  return get<std::string>(value_->is_string(), "a string");
}

std::int64_t Json::integer() const {
  const auto value = get<std::int64_t>(value_->is_number_integer(), "a whole number");
  check(value >= 0 || !value_->is_number_unsigned(), where_, " is ", shown(*value_), ", which does not fit in 64 bits");
  return value;
}

double Json::number() const {
  return get<double>(value_->is_number(), "a number");
}

bool Json::boolean() const {
  return get<bool>(value_->is_boolean(), "true or false");
}

void Json::set(const std::string& key, const Json& value) {
  (*value_)[key] = *value.value_;
}
void Json::set(const std::string& key, const Scalar& value) {
  std::visit([&](const auto& v) { (*value_)[key] = v; }, value);
}
void Json::push(const Scalar& value) {
  std::visit([&](const auto& v) { value_->push_back(v); }, value);
}

// A string that is not UTF-8 (bytes of a sample) is written with replacement characters instead of failing.
std::string Json::dump(int indent) const {
  return value_->dump(indent, ' ', false, Value::error_handler_t::replace);
}

}  // namespace onescale

#include "model/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <numeric>

#include "model/half.h"
#include "parallel/file.h"
#include "tests/model/half_bits.h"
#include "tests/temp_dir.h"

namespace onescale {
namespace {

// A file with this header and `data` bytes behind it.
void write_raw(const std::string& path, const std::string& header, std::size_t data, std::uint64_t announced = 0) {
  const std::uint64_t length = announced ? announced : header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), 8);
  file << header << std::string(data, '\1');
}

TEST(Safetensors, WhatIsWrittenReadsBack) {
  const TempDir dir;
  const std::string path = dir / "a.safetensors";
  std::vector<float> a(7 * 11), b(300001);  // b spans several pieces of the converter
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < b.size(); ++i) b[i] = std::cos(static_cast<float>(i)) * 1e-3f;
  std::vector<std::uint16_t> halves(b.size());
  const std::vector<std::int64_t> ids = {-1, 1LL << 40, 7};
  const double loss = 1.0 / 3;
  const std::vector<StoredTensor> list = {{"loss", FileType::F64, {1}},      {"ids", FileType::I64, {3}},
                                          {"a", FileType::F32, {7, 11}},     {"none", FileType::F32, {0, 4}},
                                          {"b16", FileType::BF16, {300001}}, {"h16", FileType::F16, {300001}},
                                          {"scalar", FileType::F32, {}}};
  SafetensorsWriter writer(path, list);
  writer.write_bytes(&loss, 8);
  writer.write_bytes(ids.data(), 24);
  writer.write(a.data(), 30);  // in pieces
  writer.write(a.data() + 30, 47);
  writer.write(b.data(), 1);
  writer.write(b.data() + 1, 300000);
  std::transform(b.begin(), b.end(), halves.begin(), half_bits);
  writer.write_bytes(halves.data(), 2);
  writer.write_bytes(halves.data() + 1, 600000);
  writer.write(a.data(), 1);
  writer.close();
  EXPECT_EQ(static_cast<std::size_t>(file_bytes(list)), read_text(path).size());

  const SafetensorsReader file(path);
  ASSERT_EQ(file.tensors().size(), 7u);
  std::vector<float> back(b.size());
  file.read(file.at("a"), 0, 77, back.data());
  EXPECT_EQ(std::memcmp(a.data(), back.data(), a.size() * 4), 0);
  file.read(file.at("a"), 13, 5, back.data());
  EXPECT_EQ(back[0], a[13]);
  EXPECT_EQ(back[4], a[17]);
  file.read(file.at("b16"), 0, 300001, back.data());
  for (std::size_t i = 0; i < b.size(); ++i) ASSERT_EQ(back[i], float_of_bfloat16(bfloat16_of_float(b[i])));
  file.read(file.at("h16"), 299990, 11, back.data());
  for (std::size_t i = 0; i < 11; ++i) ASSERT_EQ(back[i], float_of_half(half_bits(b[299990 + i])));
  double d = 0;
  file.read(file.at("loss"), 0, 1, &d);
  EXPECT_EQ(d, loss);
  file.read(file.at("loss"), 0, 1, back.data());
  EXPECT_EQ(back[0], static_cast<float>(loss));
  std::vector<std::int64_t> got(3);
  file.read(file.at("ids"), 0, 3, got.data());
  EXPECT_EQ(got, ids);
  file.read(file.at("scalar"), 0, 1, back.data());
  EXPECT_EQ(back[0], a[0]);
  EXPECT_EQ(file.find("nothing"), nullptr);
  // The checksum is that of the tensor's bytes.
  EXPECT_EQ(writer.checksums().at("a"), checksum(a.data(), a.size() * 4));
  char expected[17];
  std::snprintf(expected, sizeof expected, "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(a.data(), a.size() * 4)));
  EXPECT_EQ(checksum(a.data(), a.size() * 4), expected);
  for (const StoredTensor& t : file.tensors()) EXPECT_EQ(file.checksum(t), writer.checksums().at(t.name)) << t.name;
}

TEST(Safetensors, ReadsWhatTransformersWrote) {
  const SafetensorsReader model(FIXTURES "/golden/mqa/model.safetensors"),
      batch(FIXTURES "/golden/mqa/batch.safetensors");
  EXPECT_EQ(model.tensors().size(), 4u + 12 * 3);
  EXPECT_EQ(model.at("transformer.wte.weight").shape, (std::vector<std::int64_t>{99, 48}));
  std::vector<std::int64_t> labels(39);
  batch.read(batch.at("labels"), 0, 39, labels.data());
  for (std::int64_t label : labels) EXPECT_TRUE(label == -100 || (label >= 0 && label < 99));
}

TEST(Safetensors, RefusesDamagedFiles) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  const std::string two =
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[)";
  struct Case {
    std::string header;
    std::size_t data;
    std::string expected;
    std::uint64_t announced = 0;
  };
  const std::vector<Case> cases = {
      {"{}", 8, "has 18 bytes, but its tensors end at 10"},
      {"{}", 0, "announces a header of 9223372036854775807", 0x7fffffffffffffff},
      {"{}", 0, "announces a header of 18446744073709551615", 0xffffffffffffffff},
      {"{}", 0, "announces a header of 3 bytes", 3},
      {"{", 0, "announces a header of 1 bytes"},
      {"[]", 0, "expected an object"},
      {"{\"a\": }", 0, "header: line 1, column 7"},
      {R"({"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", 8, "tensor a has the dtype \"F31\""},
      {R"({"a":{"shape":[2],"data_offsets":[0,8]}})", 8, "a has no key \"dtype\""},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "tensor a F32 [3] does not fill its 8 bytes"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "tensor a F32 [-2] does not fill"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,8]}})", 8, "does not fill"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", 0, "does not fill"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,16]}})", 8,
       "tensor a lies at bytes 0 to 16, but the file has 8"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8, "tensor a lies at bytes -8 to 0"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "tensor a lies at bytes 8 to 0"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8, "has 1 data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551615]}})", 8, "does not fit in 64 bits"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8.0]}})", 8, "expected a whole number"},
      {two + "4,8]}}", 8, "tensor b begins at byte"},          // overlap
      {two + "12,16]}}", 16, "tensor b begins at byte"},       // hole
      {two + "8,12]}}", 20, "bytes, but its tensors end at"},  // bytes behind the last tensor
      {two + "8,12]},\"a\":{}}", 12, "the key \"a\" appears twice"},
  };
  for (const Case& c : cases) {
    write_raw(path, c.header, c.data, c.announced);
    const std::string said = sentence([&] { SafetensorsReader file(path); });
    EXPECT_NE(said.find(c.expected), std::string::npos) << c.header << "\n" << said;
    EXPECT_NE(said.find(path), std::string::npos) << said;
    EXPECT_TRUE(said.ends_with("; copy or write the file anew")) << said;
    EXPECT_THROW(SafetensorsReader{path}, DamagedFile) << c.header;
  }
  write_raw(path, two + "8,12]}}", 12);
  EXPECT_EQ(sentence([&] { SafetensorsReader file(path); }), "");
  const std::string whole = read_text(path);
  for (std::size_t n = 0; n < whole.size(); ++n) {  // truncated anywhere
    std::ofstream(path, std::ios::binary) << whole.substr(0, n);
    ASSERT_THROW(SafetensorsReader{path}, DamagedFile) << n;
  }
  EXPECT_THROW(SafetensorsReader{dir / "none"}, DamagedFile);
  EXPECT_THROW(SafetensorsReader{dir.path()}, DamagedFile);
}

// A single flipped bit of the header is refused, or leaves a file whose tensors still lie within it (a name or the
// metadata changed).
TEST(Safetensors, FlippedHeaderBitsNeverCrash) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  SafetensorsWriter writer(path, {{"a", FileType::F32, {2, 3}}, {"b", FileType::I64, {1}}});
  const std::vector<char> data(32);
  writer.write_bytes(data.data(), 24);
  writer.write_bytes(data.data(), 8);
  writer.close();
  const std::string whole = read_text(path);
  for (std::size_t bit = 0; bit < (whole.size() - 32) * 8; bit += 5) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    std::ofstream(path, std::ios::binary) << flipped;
    try {
      const SafetensorsReader file(path);
      for (const StoredTensor& t : file.tensors()) file.checksum(t);
    } catch (const DamagedFile&) {
      continue;
    }
  }
}

TEST(Safetensors, RefusesWrongUse) {
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  const std::vector<float> values(8);
  SafetensorsWriter writer(path, {{"a", FileType::F32, {2}}, {"i", FileType::I64, {1}}});
  EXPECT_NE(sentence([&] { writer.write(values.data(), 3); }).find("beyond the end of a F32 [2]"), std::string::npos);
  writer.write(values.data(), 2);
  EXPECT_NE(sentence([&] { writer.write(values.data(), 1); }).find("float values were given for i"), std::string::npos);
  EXPECT_NE(sentence([&] { writer.close(); }).find("tensor i I64 [1] was not written to its end"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(path));  // not before it is whole
  writer.write_bytes(values.data(), 8);
  EXPECT_NE(sentence([&] { writer.write(values.data(), 1); }), "");
  writer.close();
  const SafetensorsReader file(path);
  float out[4];
  EXPECT_NE(sentence([&] { file.read(file.at("a"), 1, 2, out); }), "");
  EXPECT_NE(sentence([&] { file.read(file.at("a"), -1, 1, out); }), "");
  EXPECT_NE(sentence([&] { file.read(file.at("i"), 0, 1, out); }).find("tensor i I64 [1] must be of F32"),
            std::string::npos);
  std::int64_t id = 0;
  EXPECT_NE(sentence([&] { file.read(file.at("a"), 0, 1, &id); }).find("tensor a F32 [2] must be of I64"),
            std::string::npos);
  EXPECT_NE(sentence([&] {
              SafetensorsWriter twice(path, {{"a", FileType::F32, {2}}, {"a", FileType::F32, {2}}});
            }),
            "");
  EXPECT_NE(sentence([&] { SafetensorsWriter nowhere(dir / "no/x", {}); }).find("no/x: cannot be opened"),
            std::string::npos);
}

TEST(Safetensors, AFullDiskIsOneSentence) {
  const TempDir dir;
  const std::vector<float> values(1 << 18);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1 << 16, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string said = sentence([&] {
    SafetensorsWriter writer(dir / "x.safetensors", {{"a", FileType::F32, {1 << 18}}});
    writer.write(values.data(), 1 << 18);
    writer.close();
  });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(said.find("x.safetensors: cannot write"), std::string::npos) << said;
}

}  // namespace
}  // namespace onescale

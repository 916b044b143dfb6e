"""Rows in order: epochs that end when they should, mixtures that keep their weights, TensorFlow Datasets."""

import itertools
import json
import shutil
import struct
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.config.config import ConfigError, load_config
from minitext.config.data import DataConfig
from minitext.data import sources
from minitext.data.batches import LocalWindows, make_batches
from minitext.data.rows import make_tokenizer, open_rows, pack_source
from minitext.data.token_file import open_token_file
from minitext.data.tokenizer import ByteTokenizer
from minitext.errors import UserError
from minitext.training.run import train
from tests.conftest import use_cache

BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with three folders of texts, whose bytes say which folder they are from."""
    folder = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    for name, count in (("abc", 30), ("def", 8), ("ghi", 50)):
        (folder / name).mkdir()
        for i in range(count):
            text = "".join(rng.choice(list(name), rng.integers(20, 300)))
            (folder / name / f"{i}.txt").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        use_cache(patch, folder / "cache")
        yield folder


def part(folder, name, weight):
    return {"weight": weight, "source": "files", "path": str(folder / name)}


def mixture(parts, **values):
    return DataConfig(source="mixture", mixture=parts, seq_len=24, **values)


def one(folder, name="abc", **values):
    return DataConfig(source="files", path=str(folder / name), **{"seq_len": 24, **values})


def source_of(window):
    return {0: "abc", 1: "def", 2: "ghi"}[(int(next(t for t in window if t < 256)) - ord("a")) // 3]


def batches(cfg, global_batch=4, **kwargs):
    return make_batches(cfg, vocab=320, global_batch=global_batch, **kwargs)


# --- epochs ------------------------------------------------------------------------------------


@given(epochs=st.integers(1, 4), batch=st.integers(1, 9), seed=st.integers(0, 9))
@settings(max_examples=8)
def test_epochs_have_every_row_once_and_then_end(folder, epochs, batch, seed):
    once = open_rows(one(folder, epochs=1, seed=seed), BYTES, "train").windows
    windows = open_rows(one(folder, epochs=epochs, seed=seed), BYTES, "train").windows
    rows = Counter(once[i].tobytes() for i in range(len(once)))
    assert Counter(windows[i].tobytes() for i in range(len(windows))) == Counter(
        {row: count * epochs for row, count in rows.items()}
    )
    made = batches(one(folder, epochs=epochs, seed=seed), batch)
    assert made.count == made.left() == -(-len(windows) // batch)
    got = list(made)
    assert len(got) == made.count
    assert made.left() == 0
    real = [each["segment_ids"].any(axis=1) for each in got]
    assert np.concatenate(real).sum() == len(windows)
    assert (got[-1]["loss_mask"][~real[-1]] == 0).all()


def test_the_order_is_new_in_each_epoch(folder):
    cfg = one(folder, epochs=2)
    windows = open_rows(cfg, BYTES, "train").windows
    half = len(windows) // 2
    first, second = ([windows[i].tobytes() for i in range(a, a + half)] for a in (0, half))
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_position_within_an_epoch_resumes(folder):
    cfg = one(folder, epochs=3)
    ours = batches(cfg)
    for _ in range(ours.count // 2):
        next(ours)
    position = json.loads(json.dumps(ours.get_state()))
    theirs = batches(cfg)
    theirs.set_state(position)
    assert theirs.left() == ours.count - ours.count // 2
    for a, b in itertools.zip_longest(ours, theirs):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
    more = batches(one(folder, epochs=4))  # more passes of the same rows go on from there
    more.set_state(position)
    assert more.left() > ours.count - ours.count // 2


def test_a_run_that_asks_for_more_than_the_epochs_is_refused(folder, tmp_path):
    values = {
        **{"run.dir": str(tmp_path), "run.name": "r", "data.source": "files"},
        **{"data.path": str(folder / "abc"), "data.seq_len": 24, "data.epochs": 1},
        **{"model.embed": 16, "model.layers": 1, "model.heads": 2, "model.mlp": 16},
        **{"train.global_batch": 8, "train.sample_tokens": 0, "mesh.simulate": None},
        **{"optim.schedule": "constant", "optim.warmup_steps": 1, "train.eval_batches": 1},
    }
    cfg = load_config("laptop").replace(values)
    count = batches(cfg.data, 8).count
    with pytest.raises(UserError, match=f"ends after step {count}, before train.steps=700"):
        train(cfg)
    assert not (tmp_path / "r").exists()
    train(cfg.replace({"train.steps": count}))
    resolved = (tmp_path / "r" / "config.yml").read_text()
    with pytest.raises(UserError, match=f"set train.steps={count} or raise data.epochs"):
        train(cfg.replace({"train.steps": count + 1}))
    assert (tmp_path / "r" / "config.yml").read_text() == resolved
    train(cfg.replace({"train.steps": count + 1, "data.epochs": 2}))
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) == count + 1


@pytest.mark.parametrize("source", ["grammar", "hf", "mixture"])
def test_epochs_go_with_rows_that_are_counted(source):
    values = {"hf_name": "x", "mixture": [{"weight": 1, "source": "stdlib"}]}
    with pytest.raises(ValueError, match="rows have no common count"):
        DataConfig(source=source, epochs=2, **values if source != "grammar" else {"hf_name": None})


# --- mixtures ----------------------------------------------------------------------------------


@given(weights=st.lists(st.integers(1, 9), min_size=3, max_size=3), start=st.integers(0, 500))
@settings(max_examples=25)
def test_every_part_of_a_mixture_has_its_share_at_any_row(folder, weights, start):
    names = ("abc", "def", "ghi")
    cfg = mixture([part(folder, n, w) for n, w in zip(names, weights, strict=True)])
    windows = open_rows(cfg, BYTES, "train").windows
    counts = Counter()
    for i in range(80):
        counts[source_of(windows[i])] += 1
        for name, weight in zip(names, weights, strict=True):
            assert abs(counts[name] - (i + 1) * weight / sum(weights)) < len(names) - 1
    # Any row can be had without those before it.
    again = open_rows(cfg, BYTES, "train").windows
    np.testing.assert_array_equal(again[start], windows[start])


def test_a_part_goes_round_by_itself(folder):
    cfg = mixture([part(folder, "def", 9), part(folder, "ghi", 1)])
    windows = open_rows(cfg, BYTES, "train").windows
    alone = open_rows(one(folder, "def"), BYTES, "train").windows
    rows = len(open_rows(one(folder, "def", epochs=1), BYTES, "train").windows)
    got = [w for i in range(3 * rows) if source_of(w := windows[i]) == "def"]
    assert len(got) > 2 * rows
    for i, window in enumerate(got):
        np.testing.assert_array_equal(window, alone[i])


def test_a_mixture_holds_out_in_its_own_proportions(folder):
    names = {"abc": 3, "ghi": 1}
    cfg = mixture([part(folder, n, w) for n, w in names.items()], validation_fraction=0.3)
    held_out = open_rows(cfg, BYTES, "validation").windows
    counts = Counter(source_of(held_out[i]) for i in range(len(held_out)))
    assert abs(counts["abc"] - 3 * counts["ghi"]) <= 4
    trained = open_rows(cfg, BYTES, "train").windows
    seen = {trained[i].tobytes() for i in range(2000)}
    assert not seen & {held_out[i].tobytes() for i in range(len(held_out))}
    assert sum(1 for _ in batches(cfg, 4, split="validation")) == -(-len(held_out) // 4)


def test_a_mixture_resumes_bit_equal(folder):
    cfg = mixture(
        [part(folder, "abc", 2.5), part(folder, "def", 1), {"weight": 1, "source": "grammar"}]
    )
    ours = batches(cfg)
    for _ in range(11):
        next(ours)
    theirs = batches(cfg)
    theirs.set_state(json.loads(json.dumps(ours.get_state())))
    np.testing.assert_array_equal(next(ours)["tokens"], next(theirs)["tokens"])
    assert ours.left() is None
    other = batches(mixture([part(folder, "abc", 1), part(folder, "def", 1)]))
    with pytest.raises(UserError, match="the saved position is in other data"):
        other.set_state(ours.get_state())


def test_a_tokenizer_of_a_mixture_learns_by_weight(folder):
    parts = [part(folder, "abc", 3), part(folder, "ghi", 1)]
    counts = Counter("".join(sources.sample(mixture(parts), 2000)))
    of_abc, of_ghi = (sum(counts[c] for c in name) for name in ("abc", "ghi"))
    assert abs(of_abc / of_ghi - 3) < 0.4
    assert next(batches(mixture(parts, tokenizer="bpe")))["tokens"].max() > 256


def test_what_is_wrong_with_a_mixture_is_one_line(folder, tmp_path):
    abc = part(folder, "abc", 1)
    twice = mixture([abc, {**abc, "path": str(folder / "abc" / "*.txt")}])
    with pytest.raises(UserError, match="parts 0 and 1 both read .*abc/0.txt"):
        batches(twice)
    pack_source(one(folder, tokenizer="bpe"), tmp_path / "packed", vocab=300, shards=1)
    packed = {"weight": 1, "source": "arrayrecord", "path": str(tmp_path / "packed")}
    with pytest.raises(UserError, match="grammar is a language of bytes"):
        batches(mixture([packed, {"weight": 1, "source": "grammar"}]))
    pack_source(one(folder, "def"), tmp_path / "bytes", vocab=300, shards=1)
    with pytest.raises(UserError, match="was packed with another tokenizer"):
        batches(mixture([packed, {**packed, "path": str(tmp_path / "bytes")}]))
    assert next(batches(mixture([packed, part(folder, "ghi", 1)])))["tokens"].max() > 256


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["data.source=mixture"], "data.source=mixture needs data.mixture"),
        (["data.mixture=[{weight: 1, source: stdlib}]"], "set data.source=mixture"),
        (
            ["data.source=mixture", "data.mixture=[{weight: 0, source: stdlib}]"],
            r"data.mixture.0.weight=0 \(command line\): choose more than 0",
        ),
        (
            ["data.source=mixture", "data.mixture=[{weight: 1, source: hf}]"],
            "data.mixture.0.source=hf",
        ),
        (
            ["data.source=mixture", "data.mixture=[{weight: 1, source: stdlib}, {weight: 1, source: files}]"],
            r"data.mixture\[1\]: data.source=files needs data.path",
        ),
        (["data.source=tfds"], "data.source=tfds needs data.tfds_name"),
    ],
)  # fmt: skip
def test_a_bad_mixture_is_refused_before_anything_is_read(settings, told):
    with pytest.raises(ConfigError, match=told) as error:
        load_config("laptop", settings)
    assert "\n" not in str(error.value)


# --- processes ---------------------------------------------------------------------------------


@given(processes=st.sampled_from([1, 2, 4, 8]), batch=st.integers(0, 9))
@settings(max_examples=10)
def test_one_packed_file_feeds_any_number_of_processes(folder, processes, batch):
    target = folder / "one_file"
    if not target.exists():
        pack_source(one(folder), target, vocab=320, shards=1)
    cfg = DataConfig(source="arrayrecord", path=str(target), seq_len=24)
    windows = open_rows(cfg, BYTES, "train").windows
    shares = np.split(np.arange(8), processes)
    local = [
        LocalWindows(windows, SimpleNamespace(shape=(8, 24), rows=rows))[batch] for rows in shares
    ]
    want = np.stack([windows[8 * batch + row] for row in range(8)])
    np.testing.assert_array_equal(np.concatenate(local), want)


# --- TensorFlow Datasets -----------------------------------------------------------------------


def as_tfrecord(tales):
    """Writes `tales` again, in a folder beside, as the TFRecord files that TensorFlow would write."""
    from array_record.python.array_record_module import ArrayRecordReader

    made = tales.parents[1] / "tfrecord" / "tales" / "1.2.0"
    made.mkdir(parents=True)
    for path in tales.iterdir():
        if "array_record" not in path.name:
            text = path.read_text().replace("array_record", "tfrecord")
            (made / path.name).write_text(text)
            continue
        reader = ArrayRecordReader(str(path))
        records = [reader.read([i])[0] for i in range(reader.num_records())]
        framed = [struct.pack("<QI", len(r), 0) + r + bytes(4) for r in records]  # no checksums
        (made / path.name.replace("array_record", "tfrecord")).write_bytes(b"".join(framed))


@pytest.fixture(scope="module")
def tales(tmp_path_factory):
    """A folder with the TensorFlow dataset `tales`, prepared without TensorFlow or a network."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class Tales(tfds.core.GeneratorBasedBuilder):
        __module__ = "tales"  # TFDS looks for files beside a class that is in a package
        VERSION = tfds.core.Version("1.2.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "number": tfds.features.Scalar(np.int32)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(60), "test": self._generate_examples(3)}

        def _generate_examples(self, count):
            for i in range(count):
                yield i, {"text": f"tale {i} of É" + " and on" * (i % 9), "number": i}

    folder = tmp_path_factory.mktemp("tfds")
    Tales(data_dir=str(folder), file_format="array_record").download_and_prepare()
    as_tfrecord(folder / "tales" / "1.2.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINITEXT_CACHE", str(folder / "cache"))
        yield folder


def from_tfds(folder, **values):
    base = {"source": "tfds", "tfds_name": "tales", "path": str(folder), "seq_len": 16}
    return DataConfig(**{**base, **values})


def test_tensorflow_datasets_are_read_whole_without_tensorflow(tales):
    cfg = from_tfds(tales, epochs=1, shuffle=False, validation_fraction=0.01)
    text = b"".join(
        bytes(t for t in row[:n] if t < 256)
        for split in ("train", "validation")
        for each in batches(cfg, split=split)
        for row, n in zip(each["tokens"], (each["segment_ids"] > 0).sum(axis=1), strict=True)
    ).decode()
    for i in range(59):
        assert f"tale {i} of É" in text
    assert "tensorflow" not in sys.modules
    half = batches(from_tfds(tales, tfds_split="train[:50%]", epochs=1)).count
    assert 0 < half < batches(from_tfds(tales, epochs=1)).count


@pytest.mark.parametrize("split", ["train", "test", "train[10%:50%]"])
def test_tfrecord_is_read_as_the_same_text(tales, split):
    ours, theirs = (
        text_digest(from_tfds(f, tfds_split=split)) for f in (tales / "tfrecord", tales)
    )
    assert ours == theirs
    assert "tensorflow" not in sys.modules


def text_digest(cfg):
    return open_token_file(cfg, BYTES).digest


def test_a_dataset_that_is_not_on_disk_is_prepared_without_tensorflow(tales, tmp_path):
    cfg = from_tfds(tmp_path)
    assert text_digest(cfg) == text_digest(from_tfds(tales))
    assert list(tmp_path.rglob("*train.array_record*")) and "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[:-20], r"cannot read .*tales-train.tfrecord-.*: Not a valid TFRecord"),
        (lambda data: data[: 12 + data[0] + 4], "ends after 1 of 60 records"),
        (lambda data: b"\xff" * 7 + b"\x0f" + data[8:], "cannot read .*tales-train.tfrecord"),
        (lambda data: data[:12] + b"\xff" * data[0] + data[12 + data[0] :], "cannot read .*tales-train"),
    ],
    ids=["cut", "short", "length", "record"],
)  # fmt: skip
def test_a_damaged_tfrecord_file_is_one_line(tales, tmp_path, change, told):
    shutil.copytree(tales / "tfrecord", tmp_path / "d")
    (path,) = tmp_path.rglob("*train.tfrecord*")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=told) as error:
        text_digest(from_tfds(tmp_path / "d"))
    assert "\n" not in str(error.value)


def test_a_format_that_cannot_be_read_says_how_to_prepare_another(tales, tmp_path):
    shutil.copytree(tales / "tfrecord", tmp_path / "d")
    (about,) = tmp_path.rglob("dataset_info.json")
    about.write_text(about.read_text().replace("tfrecord", "riegeli"))
    with pytest.raises(UserError, match="with: tfds build tales --file_format=array_record"):
        text_digest(from_tfds(tmp_path / "d"))


def test_tensorflow_datasets_mix_and_are_packed(tales, folder, tmp_path):
    parts = [{"weight": 1, "source": "tfds", "tfds_name": "tales", "path": str(tales)}]
    assert next(batches(mixture([*parts, part(folder, "abc", 1)])))["tokens"].any()
    assert pack_source(from_tfds(tales), tmp_path / "packed", vocab=320, shards=2)["train"] > 0
    assert make_tokenizer(from_tfds(tales, tokenizer="bpe"), 270).vocab_size > 257


def test_splits_of_a_tensorflow_dataset_are_texts_of_their_own(tales):
    one = {"weight": 1, "source": "tfds", "tfds_name": "tales", "path": str(tales)}
    assert next(batches(mixture([one, {**one, "tfds_split": "test"}])))["tokens"].any()
    with pytest.raises(UserError, match="parts 0 and 1 both read tales train"):
        batches(mixture([one, {**one, "tfds_split": "train[:10%]"}]))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"tfds_name": "no_such_tales"}, "cannot open data.tfds_name=no_such_tales"),
        ({"tfds_split": "later"}, "Unknown split 'later'"),
        ({"tfds_name": "tales:9.0.0"}, "cannot open data.tfds_name=tales:9.0.0"),
        ({"text_key": "story"}, "no 'story' among number, text: set data.text_key"),
        ({"text_key": "number"}, "'number' holds .*, not text"),
    ],
)
def test_what_is_wrong_with_a_tensorflow_dataset_is_one_line(tales, values, told):
    with pytest.raises(UserError, match=told) as error:
        batches(from_tfds(tales, **values))
    assert "\n" not in str(error.value)


def test_without_the_library_it_says_what_to_install(tales, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install 'minitext\[tfds\]'"):
        batches(from_tfds(tales))

"""`rlreplay inspect` and `rlreplay convert`: the fixtures' answers, hostile files, exit codes."""

import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from rlreplay import (
    MissingMaskError,
    MissingTokenError,
    ReplayError,
    Rollout,
    RolloutSamplingMask,
    cli,
)
from rlreplay.cli import _app, _files, _records
from rlreplay.cli._files import read_records
from rlreplay.cli._inspection import Inspection, SizeProfile, printable
from rlreplay.cli._payloads import records_of
from rlreplay.cli._records import Place, Problem, ReadOptions, Response
from rlreplay.engines import sglang, slime, vllm
from tests.fast.payloads import ANSWERS, DATA, Drawn, drawn_responses, fixture, spoiled

SELECTED = "sglang_generate_selected.json"
SUPPORT = "sglang_generate_support.json"
PRODUCERS = {SELECTED: "sglang", SUPPORT: "sglang", "sglang_abort.json": "sglang",
             "vllm_generate.json": "vllm", "slime_meta_info.json": "slime"}  # fmt: skip
ROOT = Path(__file__).parents[2]
MAIN = "from rlreplay.cli import main; main()"
NOTHING = Drawn([1, 2], [], [], [], "stop")
ONE = Drawn([1, 2], [7, 3], [[7, 5], [3, 4, 9]], [[1, 3], [2, 1, 1]], "stop")


def sglang_payload(drawn: Drawn, **meta):
    return {
        "output_ids": drawn.tokens,
        "meta_info": {
            "finish_reason": {"type": drawn.finish_reason},
            "prompt_tokens": len(drawn.prompt),
            "output_token_sampling_mask": drawn.supports,
            "output_token_sampling_logprobs": drawn.support_log_probs(),
            **meta,
        },
    }


def sound(name):
    """A fixture without the choice that lacks its mask."""
    payload = fixture(name)
    response = payload["response"]
    if "choices" in response:
        kept = [choice for choice in response["choices"] if choice["sampling_mask"] is not None]
        assert len(kept) == len(response["choices"]) - 1
        payload["response"] = {**response, "choices": kept}
    return payload


def chat(payloads):
    choices = [
        {"completion_token_ids": p["output_ids"], "meta_info": p["meta_info"]} for p in payloads
    ]
    return {"choices": choices}


def write_lines(path: Path, *lines) -> Path:
    """Each line as it is where it is bytes, as JSON otherwise."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


@pytest.fixture
def file(tmp_path):
    return lambda *lines, name="rollouts.jsonl": write_lines(tmp_path / name, *lines)


def run(*arguments, code):
    finished = CliRunner().invoke(_app.app, [str(a) for a in arguments])
    assert finished.exit_code == code, finished.output
    assert finished.exception is None or isinstance(finished.exception, SystemExit)
    return finished


def report(*arguments, code=0):
    return json.loads(run("inspect", "--json", *arguments, code=code).stdout)


def paired(log_probs):
    return [[value, token] for value, token in zip(log_probs, ONE.tokens, strict=True)]


def plain(*arguments, code=0):
    """The printed report without its frames and line breaks."""
    text = run(*arguments, code=code).output
    return " ".join("".join(" " if c in "│┌┐└┘├┤┬┴┼─" else c for c in text).split())


def findings(*arguments):
    """(kind, line, response, row) of every finding; there must be some."""
    found = report(*arguments, code=1)["findings"]
    assert found["total"] == len(found["first"]) == sum(found["by_kind"].values())
    return [(f["kind"], f["line"], f["response"], f["row"]) for f in found["first"]]


def percentile(sizes, percent):
    return sorted(sizes)[max(1, math.ceil(percent / 100 * len(sizes))) - 1]


# inspect


@pytest.mark.parametrize("name", PRODUCERS)
def test_fixtures_are_sound_and_told_by_their_shape(file, name):
    payload = sound(name)

    found = report(file(payload))

    count = len(payload["response"]) if isinstance(payload["response"], list) else 1
    assert found["producers"] == {PRODUCERS[name]: count}
    assert found["responses"] == {"read": count, "bad": 0, "unfinished": 0}
    assert report(file(payload), "--engine", PRODUCERS[name]) == found


def test_sizes_and_log_probs_are_the_answers(file):
    found = report(file(fixture(SELECTED)))

    answers = [ANSWERS[f"sglang_selected[{i}]"] for i in range(3)]
    sizes = list(itertools.chain.from_iterable(a["support_sizes"] for a in answers))
    rows = {"total": len(sizes), "not_in_loss": 0, "in_loss": len(sizes)}
    assert found["rows"] == {**rows, "forced": sizes.count(1), "unrestricted": 0}
    assert found["support_size"]["mean"] == sum(sizes) / len(sizes)
    assert found["support_size"]["ids"] == sum(sizes)
    percentiles = {int(p): size for p, size in found["support_size"]["percentiles"].items()}
    assert percentiles == {p: percentile(sizes, p) for p in percentiles}
    log_probs = found["rollout_log_probs"]
    total = sum(a["log_prob_sum"] for a in answers)
    assert log_probs["mean"] * log_probs["rows"] == pytest.approx(total, rel=1e-6)
    assert log_probs["max"] == 0
    assert found["support_entropy"] == {"rows": 0, "mean": None, "max": None}
    assert found["kept_mass"]["rows_unknown"] == len(sizes)


def test_entropy_is_known_in_support_mode(file):
    found = report(file(fixture(SUPPORT)))["support_entropy"]

    expected = ANSWERS["sglang_support"]["support_entropy_sum"]
    assert found["mean"] * found["rows"] == pytest.approx(expected, rel=1e-6)


def test_entropies_that_round_below_0_are_0(file):
    forced = Drawn([1], [7, 3], [[7], [3]], [[1], [1]], "stop")
    above = sglang_payload(forced, output_token_sampling_logprobs=[[1e-7], [1e-7]])

    assert report(file(above))["support_entropy"] == {"rows": 2, "mean": 0, "max": 0}


def test_chat_batches_and_bare_responses_are_the_same_responses(file):
    payload = fixture(SELECTED)
    bare = report(file(*payload["response"]))

    assert report(file(payload["response"])) == bare
    assert report(file(chat(payload["response"]))) == bare
    assert report(file(b"", payload, b"  \t")) == bare


def test_kept_mass_is_full_over_support_probability(file):
    """A vocabulary of which the supports hold 0.8 and 0.5."""
    kept = [0.8, 0.5]
    full = [value + math.log(m) for value, m in zip(ONE.log_probs(), kept, strict=True)]
    logged = [[value, token, None] for value, token in zip(full, ONE.tokens, strict=True)]
    hot = [
        [value + 1, token, None] for value, token in zip(ONE.log_probs(), ONE.tokens, strict=True)
    ]

    known = report(file(sglang_payload(ONE, output_token_logprobs=logged)))["kept_mass"]
    above = report(file(sglang_payload(ONE, output_token_logprobs=hot)))["kept_mass"]

    assert known["rows"] == 2
    assert known["mean"] == pytest.approx(0.65, rel=1e-6)
    assert (known["min"], known["max"]) == pytest.approx((0.5, 0.8), rel=1e-6)
    assert known["why_unknown"] is None
    assert (above["rows"], above["rows_above_one"], above["rows_unknown"]) == (0, 2, 2)
    text = plain("inspect", file(sglang_payload(ONE, output_token_logprobs=hot)))
    assert "another distribution" in text
    assert "it would be in 2 rows" in text


def test_one_mass_above_1_makes_all_of_them_unknown(file):
    """The other rows' log-probs are of that distribution too: what is below 1 is no mass."""
    lows, half = [value - 2 for value in ONE.log_probs()], ONE.log_probs()
    lines = [
        sglang_payload(ONE, output_token_logprobs=logged)
        for logged in (paired(lows), paired([half[0] - 1, half[1] + 0.01]))
    ]

    found = report(file(*lines))["kept_mass"]

    assert (found["rows"], found["mean"], found["min"], found["max"]) == (0, None, None, None)
    assert (found["rows_above_one"], found["rows_unknown"]) == (1, 4)
    assert "another distribution" in found["why_unknown"]
    assert "it would be in 1 row " in plain("inspect", file(*lines))


@pytest.mark.parametrize(("over", "rounded", "above"), [(5e-5, 2, 0), (2e-4, 0, 2), (0.0, 0, 0)])
def test_a_mass_above_1_by_rounding_counts_as_1_and_is_counted(file, over, rounded, above):
    single = Drawn([1], [7, 3], [[7], [3]], [[1], [1]], "stop")  # log-probs of exactly 0
    logged = [[over, 7], [over, 3]]

    found = report(file(sglang_payload(single, output_token_logprobs=logged)))["kept_mass"]

    assert (found["rows_rounded_to_one"], found["rows_above_one"]) == (rounded, above)
    assert (found["rows"], found["max"]) == ((0, None) if above else (2, 1.0))
    text = plain("inspect", file(sglang_payload(single, output_token_logprobs=logged)))
    assert ("2 rows, above it by rounding" in text) == bool(rounded)


def test_a_pipe_is_read_once_and_whole(file, tmp_path, storage):
    payload = {"prompt_ids": ONE.prompt, "response": sglang_payload(ONE)}
    lines = file(*[payload] * 5).read_bytes().splitlines(keepends=True)
    for command in (["inspect", "--json"], ["convert", tmp_path / "out.arrow"]):
        pipe = tmp_path / f"pipe-{command[0]}"
        os.mkfifo(pipe)
        files = [pipe, *command[1:]] if command[0] == "convert" else [*command[1:], pipe]
        reader = subprocess.Popen(
            [sys.executable, "-c", MAIN, command[0], *map(str, files)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        with pipe.open("wb") as writer:
            for line in lines:
                writer.write(line)
                writer.flush()
        output, _ = reader.communicate(timeout=60)
        assert reader.returncode == 0
        if command[0] == "inspect":
            assert json.loads(output)["responses"]["read"] == 5
    assert len(storage.read_rollouts(tmp_path / "out.arrow")) == 5


def test_convert_of_nothing_writes_nothing(file, tmp_path, storage):
    target = tmp_path / "out.arrow"
    assert "holds no response" in run("convert", file(), target, code=1).output
    assert not target.exists()


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
@pytest.mark.parametrize(
    ("prompt", "response", "support", "row"),
    [([12], 3, 5, None), ([1], 12, 5, 1), ([1], 3, 12, 1)],
)
def test_columnar_files_are_held_to_the_vocabulary(
    file, tmp_path, storage, suffix, prompt, response, support, row
):
    mask = RolloutSamplingMask.from_mask_list([[2], sorted({response, support})])
    odd = Rollout(prompt_ids=prompt, response_ids=[2, response], sampling_mask=mask)
    path, target = tmp_path / f"in{suffix}", tmp_path / "out.parquet"
    storage.write_rollouts(path, [ONE.rollout(), odd, ONE.rollout()])

    assert report(path, "--vocab-size", 13)["responses"]["read"] == 3
    assert findings(path, "--vocab-size", 12) == [("invalid", None, 1, row)]
    found = report(path, "--vocab-size", 12, code=1)["responses"]
    assert (found["read"], found["bad"]) == (2, 1)
    text = run("convert", path, target, "--vocab-size", 12, code=1).output
    assert "response 1" in text
    assert not target.exists()
    run("convert", path, target, "--vocab-size", 13, code=0)


PAYLOAD_OPTIONS = [
    ("--engine", "sglang"), ("--on-missing-mask", "raise"), ("--on-uncommitted-token", "drop"),
    ("--logprobs-mode", "processed_logprobs"), ("--log-probs-over", "support"),
]  # fmt: skip


@pytest.mark.parametrize("option", PAYLOAD_OPTIONS)
@pytest.mark.parametrize("name", ["a.arrow", "a.parquet", "a.bin"])
def test_columnar_files_take_no_options_on_payloads(file, tmp_path, storage, option, name):
    """Not even a default: it would be ignored."""
    lines = file({**sglang_payload(ONE), "prompt_ids": ONE.prompt})
    stored = tmp_path / ("a.arrow" if name == "a.bin" else name)
    storage.write_rollouts(stored, [ONE.rollout()])
    path = stored.rename(tmp_path / name)

    assert option[0] in run("inspect", lines, path, *option, code=2).output
    run("convert", path, tmp_path / "b.arrow", *option, code=2)
    assert not (tmp_path / "b.arrow").exists()
    run("inspect", lines, *option, code=0)


def test_the_options_of_payloads_are_all_known():
    names = {name.removeprefix("--").replace("-", "_") for name, _ in PAYLOAD_OPTIONS}

    assert {*names, "vocab_size", "need_prompt"} == set(ReadOptions.__dataclass_fields__)
    assert all(ReadOptions(**{name: "x"}).of_payloads == [name] for name in names)
    assert ReadOptions(vocab_size=3, need_prompt=True).of_payloads == []


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_columnar_files_advance_by_groups(tmp_path, storage, suffix, count):
    path = tmp_path / f"a{suffix}"
    storage.write_rollouts(path, [ONE.rollout()] * count, rollouts_per_group=2)
    told, behind = [], []

    for record in read_records(path, ReadOptions(), told.append):
        behind.append((record.place.response, len(told)))

    responses = [(i, i // 2) for i in range(count)] or [(None, 1)]
    assert behind == responses
    assert sum(told) == path.stat().st_size
    assert all(step >= 0 for step in told)


def test_a_damaged_columnar_file_is_told_as_done_too(tmp_path, storage):
    path, told = tmp_path / "a.parquet", []
    storage.write_rollouts(path, [ONE.rollout()])
    path.write_bytes(path.read_bytes()[:-20])

    assert [type(r) for r in read_records(path, ReadOptions(), told.append)] == [Problem]
    assert sum(told) == path.stat().st_size


def test_a_pipe_of_a_columnar_file_is_refused(tmp_path, storage):
    pipe = tmp_path / "a.arrow"
    os.mkfifo(pipe)

    assert findings(pipe) == [("unreadable", None, None, None)]


def test_what_the_loss_mask_leaves_out_is_counted_and_not_measured(tmp_path, storage):
    (first,) = sglang.from_response(sglang_payload(ONE), prompt_ids=ONE.prompt)
    prompt = [*ONE.prompt, *ONE.tokens]
    fields = {name: getattr(first, name) for name in storage.FIELDS}
    turns = [first, Rollout(**fields | {"prompt_ids": [*prompt, 30, 31, 32]})]
    merged, path = Rollout.merge_turns(turns), tmp_path / "merged.arrow"
    assert first.support_log_probs is not None
    storage.write_rollouts(path, [merged])
    storage.write_rollouts(tmp_path / "apart.arrow", turns)

    found, apart = report(path), report(tmp_path / "apart.arrow")

    assert found["rows"] == {**apart["rows"], "total": 7, "not_in_loss": 3}
    assert apart["rows"]["forced"] == 0
    for name in ("support_size", "support_entropy", "rollout_log_probs"):
        assert found[name] == apart[name]
    assert found["rollout_log_probs"]["max"] < 0
    assert "not in the loss 3 (42.9%), left out below" in plain("inspect", path)
    assert "not in the loss" not in plain("inspect", tmp_path / "apart.arrow")


def test_output_that_cannot_be_written_is_no_finding(file):
    payload = file(sglang_payload(ONE))
    for arguments in (["inspect", "--json"], ["inspect"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", MAIN, *arguments, str(payload)],
                stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
                cwd=ROOT,
            )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert "cannot be written" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_terminal_without_unicode_gets_escapes(file):
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "inspect", str(file({"é☃x": 1}))],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "logged",
    [None, 7, [], [[-1.0, 7, None]], [[-1.0, 8], [-1.0, 3]], [["x", 7], [-1.0, 3]], [1, 2]],
)
def test_kept_mass_is_not_known_where_the_log_probs_are_not_the_tokens(file, logged):
    found = report(file(sglang_payload(ONE, output_token_logprobs=logged)))["kept_mass"]

    assert (found["rows"], found["rows_unknown"], found["mean"]) == (0, 2, None)


BAD_LINES = {
    "cut in half": (json.dumps(sglang_payload(ONE)).encode()[:70], "broken_json", None, None),
    "not utf-8": (b'{"output_ids": "\xff\xfe"}', "broken_json", None, None),
    "two values": (b"{} {}", "broken_json", None, None),
    "deep": (b"[" * 100_000, "broken_json", None, None),
    "long number": (b"9" * 10_000, "broken_json", None, None),
    "a key twice": (
        b'{"prompt_ids": [1], "prompt_ids": [2], ' + json.dumps(sglang_payload(ONE)).encode()[1:],
        "broken_json", None, None),
    "a key twice, deep inside": (
        json.dumps(sglang_payload(ONE)).encode()[:-2] + b', "prompt_tokens": 2}}',
        "broken_json", None, None),
    "prompts beside the response that differ": (
        {"prompt_ids": [1, 2], "prompt_token_ids": [2, 1], "response": sglang_payload(ONE)},
        "invalid", 0, None),
    "a number": (b"7", "unknown_producer", 0, None),
    "an unknown object": ({"text": "hello"}, "unknown_producer", 0, None),
    "no response": ([], "empty", None, None),
    "no choice": ({"choices": []}, "empty", 0, None),
    "no choice in a batch": ([sglang_payload(ONE), {"choices": []}], "empty", 1, None),
    "prompts of another batch": (
        {"prompt_ids": [[1], [2]], "response": sglang_payload(ONE)}, "invalid", None, None),
    "no mask": (
        sglang_payload(ONE, output_token_sampling_mask=None), "missing_mask", 0, 0),
    "token outside": (
        sglang_payload(ONE, output_token_sampling_mask=[[7, 5], [4, 9, 8]]),
        "token_outside_support", 0, 1),
    "empty row": (sglang_payload(ONE, output_token_sampling_mask=[[7, 5], []]), "invalid", 0, 1),
    "NaN": (
        sglang_payload(ONE, output_token_sampling_logprobs=[-0.5, math.nan]), "invalid", 0, 1),
    "one choice of two": (
        chat([sglang_payload(ONE), sglang_payload(ONE, output_token_sampling_mask=None)]),
        "missing_mask", 1, 0),
    "an unknown one in a batch": (
        [sglang_payload(ONE), 5], "unknown_producer", 1, None),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_found_and_the_rest_goes_on(file, name):
    line, kind, response, row = BAD_LINES[name]
    path = file(sglang_payload(ONE), line, sglang_payload(ONE))

    assert findings(path) == [(kind, 2, response, row)]
    assert report(path, code=1)["responses"]["read"] == 2 + (response == 1)


def test_all_bad_lines_together(file):
    path = file(*(line for line, *_ in BAD_LINES.values()))

    expected = [(kind, n, *at) for n, (_, kind, *at) in enumerate(BAD_LINES.values(), start=1)]
    assert findings(path) == expected
    short = report(path, "--max-findings", "3", code=1)["findings"]
    assert (short["total"], len(short["first"])) == (len(expected), 3)
    printed = run("inspect", path, "--max-findings", "3", code=1).output
    assert f"{len(expected) - 3} more" in printed


def test_the_hostile_fixtures_are_all_found(file):
    cases = json.loads((DATA / "hostile_sglang.json").read_text())
    lines = [{"prompt_ids": c["prompt_ids"], "response": c["response"]} for c in cases]

    found = findings(file(*lines), "--vocab-size", cases[0]["vocab_size"])

    assert {case["vocab_size"] for case in cases} == {cases[0]["vocab_size"]}
    assert [line for _, line, *_ in found] == list(range(1, len(cases) + 1))


def test_a_missing_mask_may_be_taken_for_none(file):
    path = file(sglang_payload(ONE), sglang_payload(ONE, output_token_sampling_mask=None))

    found = report(path, "--on-missing-mask", "unrestricted")

    assert (found["rows"]["total"], found["rows"]["unrestricted"]) == (4, 2)
    assert "2 (50.0%)" in run("inspect", path, "--on-missing-mask", "unrestricted", code=0).output


def test_a_declared_prompt_is_checked(file):
    path = file(
        sglang_payload(ONE, prompt_tokens=99),
        {"prompt_ids": ONE.prompt, "response": sglang_payload(ONE, prompt_tokens=99)},
        {**sglang_payload(ONE, prompt_tokens=99), "prompt_ids": ONE.prompt},
        {**sglang_payload(ONE), "prompt_ids": ONE.prompt},
    )

    assert findings(path) == [("invalid", 2, 0, None), ("invalid", 3, 0, None)]


def payloads_that_say_a_prompt(prompt, beside=None):
    """Each place where a payload may say `prompt`, where `beside` is said beside its response."""
    sg, vl = sglang_payload(ONE), {"token_ids": ONE.tokens, "sampling_mask": ONE.supports}
    vl["finish_reason"] = "stop"
    bodies = {
        "sglang": {**sg, "prompt_ids": prompt},
        "sglang, vLLM's name": {**sg, "prompt_token_ids": prompt},
        "sglang, meta_info": sglang_payload(ONE, prompt_token_ids=prompt),
        "sglang, chat": {**chat([sg]), "prompt_ids": prompt},
        "sglang, chat, meta_info": chat([sglang_payload(ONE, prompt_token_ids=prompt)]),
        "vllm": {"prompt_token_ids": prompt, "choices": [vl]},
        "vllm, our name": {"prompt_ids": prompt, "choices": [vl]},
        "vllm, choice": {"choices": [{**vl, "prompt_token_ids": prompt}]},
    }
    lines = {name: {"prompt_ids": beside, "response": body} for name, body in bodies.items()}
    batch = {"prompt_ids": [beside], "response": [bodies["sglang"]]}
    return lines | {
        "batch": batch,
        "beside": {"prompt_ids": beside, "prompt_token_ids": prompt, "response": sg},
        "bare": {**sg, "prompt_ids": beside, "prompt_token_ids": prompt},
        "bare, vllm": {"prompt_ids": beside, "prompt_token_ids": prompt, "choices": [vl]},
    }


@pytest.mark.parametrize("name", payloads_that_say_a_prompt(None))
def test_a_prompt_that_is_said_twice_must_be_the_same(file, tmp_path, storage, name):
    target = tmp_path / "out.arrow"
    differs = file(payloads_that_say_a_prompt([2, 1], beside=ONE.prompt)[name])
    assert findings(differs) == [("invalid", 1, 0, None)]
    assert "two prompts" in run("convert", differs, target, code=1).output
    assert not target.exists()

    for beside in (ONE.prompt, None) if name != "batch" else (ONE.prompt,):  # null says nothing
        same = file(payloads_that_say_a_prompt(ONE.prompt, beside)[name])
        assert report(same)["responses"]["read"] == 1
        run("convert", same, target, "--overwrite", code=0)
        (rollout,) = storage.iter_rollouts(target)
        assert rollout.prompt_ids.tolist() == ONE.prompt

    null = file(payloads_that_say_a_prompt(None, ONE.prompt)[name])
    assert report(null)["responses"]["read"] == 1
    run("convert", null, target, "--overwrite", code=0)


@pytest.mark.parametrize("odd", [[], [[1, 2]], "12", 1, [1.5], {}, False])
def test_a_second_prompt_that_is_none_is_refused(file, odd):
    payload = {"prompt_ids": ONE.prompt, "response": {**sglang_payload(ONE), "prompt_ids": odd}}

    assert findings(file(payload)) == [("invalid", 1, 0, None)]


def test_each_response_of_a_batch_has_its_own_prompt_said_twice(file):
    prompts, wrong = [[1, 2], [3, 4]], [[1, 2], [4, 3]]
    bodies = [{**sglang_payload(ONE), "prompt_ids": prompt} for prompt in prompts]

    assert report(file({"prompt_ids": prompts, "response": bodies}))["responses"]["read"] == 2
    two = {"prompt_ids": prompts, "prompt_token_ids": wrong, "response": [sglang_payload(ONE)] * 2}
    for line in ({"prompt_ids": wrong, "response": bodies}, two):
        assert findings(file(line)) == [("invalid", 1, 1, None)]


def test_the_key_that_is_there_twice_is_named(file):
    (found,) = report(file(BAD_LINES["a key twice"][0]), code=1)["findings"]["first"]

    assert "'prompt_ids' 2 times" in found["message"]


@pytest.mark.parametrize("name", ["sglang_stream_cumulative.jsonl", "sglang"])
def test_chunks_are_told_to_be_unfinished(file, tmp_path, storage, name):
    if name == "sglang":
        ends = [None, None, {"type": "stop"}]
        chunks = [sglang_payload(ONE, finish_reason=end) for end in ends]
    else:
        chunks = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    ends = [chunk["meta_info"]["finish_reason"] for chunk in chunks]
    path = file(*({"prompt_ids": [1] * c["meta_info"]["prompt_tokens"], **c} for c in chunks))

    unfinished = ends.count(None)
    assert 0 < unfinished < len(chunks)
    counts = {"read": len(chunks), "bad": 0, "unfinished": unfinished}
    assert report(path)["responses"] == counts
    assert f"unfinished {unfinished} (finish_reason is null" in plain("inspect", path)
    text = run("convert", path, tmp_path / "out.arrow", code=0).output
    assert f"{unfinished} unfinished" in text


@pytest.mark.parametrize("name", [name for name in PRODUCERS if "abort" not in name])
def test_every_producer_may_leave_a_response_unfinished(file, name):
    payload = sound(name)
    body = payload["response"][0] if isinstance(payload["response"], list) else payload["response"]
    holder = body["choices"][0] if "choices" in body else body["meta_info"]
    bodies = [body, chat([body])] if PRODUCERS[name] == "sglang" else [body]

    def unfinished():
        return report(file(*bodies))["responses"]["unfinished"]

    assert unfinished() == 0
    holder["finish_reason"] = None
    assert unfinished() == len(bodies)
    del holder["finish_reason"]  # says nothing
    assert unfinished() == 0


def test_whole_responses_are_not_called_unfinished(file, tmp_path, storage):
    path = file({**sglang_payload(ONE), "prompt_ids": ONE.prompt})

    assert "unfinished" not in plain("inspect", path)
    assert "unfinished" not in run("convert", path, tmp_path / "out.arrow", code=0).output


def test_engine_options_reach_the_loaders(file):
    slipped = sglang_payload(ONE, finish_reason={"type": "abort"})
    slipped = {**slipped, "output_ids": [*ONE.tokens, 5]}
    run("inspect", file(slipped), code=1)
    run("inspect", file(slipped), "--on-uncommitted-token", "drop", code=0)

    vllm_file, slime_file = file(sound("vllm_generate.json")), "slime_meta_info.json"
    assert report(vllm_file)["rollout_log_probs"]["rows"] > 0
    raw = report(vllm_file, "--logprobs-mode", "raw_logprobs")
    assert raw["rollout_log_probs"]["rows"] == 0
    assert report(file(fixture(slime_file)))["rollout_log_probs"]["rows"] == 0
    run("inspect", file(fixture(SELECTED)), "--engine", "vllm", code=1)
    run("inspect", file(fixture(SELECTED)), "--engine", "slime", code=1)


def test_several_files_are_one_report(file):
    good, empty = file(sglang_payload(ONE), name="a.jsonl"), file(name="b.jsonl")
    broken = file(b"{", name="c.jsonl")

    found = report(good, empty, broken, code=1)

    assert found["files"] == [str(good), str(empty), str(broken)]
    assert [(f["kind"], f["file"]) for f in found["findings"]["first"]] == [
        ("empty", str(empty)),
        ("broken_json", str(broken)),
    ]


def test_a_file_that_is_given_twice_is_refused(file, tmp_path):
    path = file(sglang_payload(ONE))
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())

    assert "again" in run("inspect", path, link, code=2).output
    assert report(path, copy)["responses"]["read"] == 2


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(file, tmp_path):
    payload = json.dumps(sglang_payload(ONE)).encode()
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([payload, b"", payload, b"{", b""]))

    assert findings(path) == [("broken_json", 4, None, None)]
    assert report(path, code=1)["responses"]["read"] == 2


def test_places_are_named():
    assert str(Place("a")) == "a"
    assert str(Place("a", 3).at(0)) == "a, line 3, response 0"


def test_the_last_line_needs_no_end(tmp_path):
    path = tmp_path / "open.jsonl"
    path.write_text(json.dumps(sglang_payload(ONE)))

    assert report(path)["responses"]["read"] == 1


def test_a_line_beyond_the_limit_is_found_and_skipped(file, monkeypatch):
    good = sglang_payload(ONE)
    limit = len(json.dumps(good)) + 1
    monkeypatch.setattr(_files, "MAX_LINE_BYTES", limit)
    path = file(good, b"1" * limit, good, b"1" * (5 * limit), good)

    assert findings(path) == [("broken_json", 2, None, None), ("broken_json", 4, None, None)]
    found = report(path, code=1)
    assert found["responses"]["read"] == 3
    assert f"at most {limit:,} bytes" in found["findings"]["first"][0]["message"]


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_the_help_names_the_limit_of_a_line(command):
    assert f"exceed {_files.MAX_LINE_BYTES >> 20} MiB" in plain(command, "--help", code=0)


def test_a_long_response_is_below_the_limit():
    supports = [[151_935] * 250] * 32_000
    payload = sglang_payload(Drawn([1], [], [], [], "stop"))
    payload["output_ids"] = [151_935] * 32_000
    payload["meta_info"]["output_token_sampling_mask"] = supports
    payload["meta_info"]["output_token_sampling_logprobs"] = [-0.123456789012345] * 32_000

    assert len(json.dumps(payload)) <= _files.MAX_LINE_BYTES


@pytest.mark.parametrize(
    ("head", "tail"),
    [(b"[", b"]"), (b'{"choices": [', b"]}"), (b'{"prompt_ids": [1], "response": [', b"]}")],
)
def test_the_responses_of_a_line_are_taken_apart_one_by_one(head, tail):
    """What is held beside the parsed line does not grow with it."""

    def beside(count):
        raw = head + b",".join([b"[]"] * count) + tail
        tracemalloc.start()
        try:
            payload = json.loads(raw)
            parsed = tracemalloc.get_traced_memory()[1]
            del payload
            tracemalloc.reset_peak()
            records = sum(1 for _ in records_of(raw, Place("a", 1), ReadOptions()))
            assert records == count
            return tracemalloc.get_traced_memory()[1] - parsed
        finally:
            tracemalloc.stop()

    beside(4000)  # caches fill
    assert beside(4000) <= beside(10) + 4000 * 8


def test_memory_does_not_grow_with_the_file(tmp_path):
    line = json.dumps(sglang_payload(ONE)["meta_info"] | {"id": "x" * 20_000})
    line = json.dumps({"output_ids": ONE.tokens, "meta_info": json.loads(line)}) + "\n"

    def peak(lines):
        path = tmp_path / "long.jsonl"
        path.write_text(line * lines)
        inspection = Inspection(max_findings=5)
        tracemalloc.start()
        try:
            for record in read_records(path, ReadOptions(), lambda done: None):
                inspection.add(record)
            assert inspection.responses == lines
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2000)  # caches fill
    assert peak(2000) <= peak(20) + len(line)


def test_the_text_report_shows_what_was_found(file):
    text = run("inspect", file(sglang_payload(ONE), b"{", name="odd.jsonl"), code=1).output

    for part in ("1 read (sglang 1)", "broken lines", "odd.jsonl", "p50 2", "not known", "nats"):
        assert part in text
    assert "nothing wrong" in run("inspect", file(sglang_payload(ONE)), code=0).output


def test_what_a_file_says_cannot_steer_the_terminal(file):
    evil = "\x1b[2J\ud800[bold]"
    path = file(sglang_payload(ONE, finish_reason={"type": [evil]}), {"\x1b[2J": 1, evil: 2})

    text = run("inspect", path, code=1).output

    assert "\x1b" not in text
    assert printable(evil) == "\\x1b[2J\\ud800[bold]"
    assert "[bold]" in text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_spoiled_payloads_are_read_or_found(tmp_path, data):
    drawn = data.draw(drawn_responses())
    line = data.draw(spoiled({"prompt_ids": drawn.prompt, "response": [sglang_payload(drawn)]}))
    path = write_lines(tmp_path / "spoiled.jsonl", line)
    options = ReadOptions(engine=data.draw(st.sampled_from([None, "sglang", "vllm", "slime"])))

    inspection = Inspection(max_findings=9)
    for record in read_records(path, options, lambda done: None):
        assert isinstance(record, Response | Problem)
        assert record.place.line == 1
        inspection.add(record)

    assert inspection.responses + inspection.found.total() > 0
    json.dumps(inspection.to_dict(), allow_nan=False)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 0.5, 0.9]),
)
def test_the_profile_has_the_quantile_of_each_stretch(lengths, seed, q):
    rng = np.random.default_rng(seed)
    responses = [np.exp(9 * rng.random(n) - 1).astype(np.int64).tolist() for n in lengths]
    profile = SizeProfile()
    for sizes in responses:
        profile.add(np.array(sizes, np.int64))

    at, found = profile.quantile(q)

    longest = max(map(len, responses))
    assert profile.width == 1 or 32 * profile.width < longest <= 64 * profile.width
    stretches = {}
    for sizes in responses:
        for position, size in enumerate(sizes):
            if size:
                stretches.setdefault(position // profile.width, []).append(size)
    assert at.tolist() == [(stretch + 0.5) * profile.width for stretch in sorted(stretches)]
    for stretch, size in zip(sorted(stretches), found, strict=True):
        exact = percentile(stretches[stretch], 100 * q)
        assert size == exact if exact <= 16 else exact * 8 / 9 < size <= exact


# Plots


@pytest.mark.parametrize("payload", [sglang_payload(ONE), fixture(SELECTED), None])
def test_plots_are_drawn_where_little_is_known_too(file, tmp_path, payload):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    lines = [sglang_payload(ONE, output_token_sampling_mask=None)] if payload is None else [payload]

    run("inspect", file(*lines), "--plot", picture, "--on-missing-mask", "unrestricted", code=0)

    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plots_to_nowhere_are_refused_before_anything_is_read(file, tmp_path):
    pytest.importorskip("matplotlib")
    path = file(sglang_payload(ONE))

    (tmp_path / "folder.png").mkdir()
    unwritable = Path("/proc/self/x.png"), Path("/proc/self/cmdline.png")
    loop = tmp_path / "loop.png"
    loop.symlink_to(loop)
    for target in (tmp_path / "none" / "x.png", tmp_path / "x.txt", tmp_path / "x",
                   tmp_path / "folder.png", loop, *unwritable):  # fmt: skip
        finished = run("inspect", path, "--plot", target, code=2)
        assert "--plot" in finished.output
        assert finished.stdout == ""


def test_a_plot_that_may_be_written_leaves_no_trace_before_it_is(file, tmp_path):
    pytest.importorskip("matplotlib")
    there, new = tmp_path / "there.png", tmp_path / "new.png"
    there.write_bytes(b"old")

    for target in (there, new):
        _app._check_plot(target)

    assert there.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == [there.name]


@pytest.mark.parametrize(("line", "code"), [(sglang_payload(NOTHING), 2), (b"{", 1)])
def test_there_is_no_plot_of_nothing(file, tmp_path, line, code):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"

    finished = run("inspect", file(line), "--plot", picture, code=code)

    assert "nothing to draw" in finished.stderr
    assert "responses" in finished.stdout
    assert not picture.exists()


# Calls


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "no such file"],
        ["inspect", "."],
        ["inspect", __file__, "--engine", "tgi"],
        ["inspect", __file__, "--vocab-size", "0"],
        ["inspect", __file__, "--on-missing-mask", "ignore"],
        ["convert", __file__],
        ["convert", __file__, "none/such.arrow"],
        ["convert", __file__, __file__],
        ["convert", ".", "such.arrow"],
        ["convert", __file__, "."],
        ["convert", __file__, "/proc/self/such.arrow"],
        ["inspect", __file__, __file__],
        ["inspect", __file__, os.path.relpath(__file__)],
        ["nothing"],
    ],
)
def test_wrong_calls_exit_with_2(arguments):
    run(*arguments, code=2)


def run_process(code_or_module, *arguments):
    return subprocess.run(
        [sys.executable, *code_or_module, *map(str, arguments)],
        capture_output=True, text=True, timeout=100, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_command_as_a_process(file):
    finished = run_process(["-c", MAIN], "inspect", "--json", file(sglang_payload(ONE), b"{"))

    assert finished.returncode == 1
    assert finished.stderr == ""  # a bar is for terminals
    assert json.loads(finished.stdout)["findings"]["by_kind"]["broken_json"] == 1


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_which_it_is(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; {MAIN}"

    finished = run_process(["-c", code])

    assert finished.returncode == 2
    assert "rlreplay[cli]" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("arguments", [["--json"], [], ["--max-findings", "0"]])
@pytest.mark.parametrize(("line", "code"), [(b"{", 1), (sglang_payload(ONE), 0)])
def test_a_reader_that_has_gone_changes_nothing(file, arguments, line, code):
    read, write = os.pipe()
    os.close(read)
    try:
        finished = subprocess.run(
            [sys.executable, "-c", MAIN, "inspect", *arguments, str(file(line))],
            stdout=write, stderr=subprocess.PIPE, text=True, timeout=100, cwd=ROOT,
        )  # fmt: skip
    finally:
        os.close(write)

    assert (finished.returncode, finished.stderr) == (code, "")


@pytest.mark.parametrize("closed", [1, 2])
def test_closed_standard_streams_are_no_error(file, closed):
    command = f'"$@" {closed}>&-'
    finished = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, "-c", MAIN, "inspect", str(file(b"{"))],
        capture_output=True, text=True, timeout=100, cwd=ROOT,
    )  # fmt: skip

    assert finished.returncode == 1
    assert finished.stderr == ""


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_an_interrupt_ends_it_and_leaves_nothing(tmp_path, command):
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    target = [str(tmp_path / "out.arrow")] if command == "convert" else []
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, command, str(pipe), *target],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with pipe.open("wb") as writer:  # opens once the process reads
        writer.write(json.dumps({**sglang_payload(ONE), "prompt_ids": [1]}).encode() + b"\n")
        writer.flush()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=100)

    assert process.returncode == 130
    assert (output, errors) == ("", "")
    assert [p.name for p in tmp_path.iterdir()] == [pipe.name]


def test_an_interrupt_while_the_libraries_are_loaded(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)

    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


def test_the_bar_is_drawn_on_a_terminal(file, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    path = file(sglang_payload(ONE))
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")

    with _app._progress([path]) as advance:
        advance(path.stat().st_size)

    assert "reading" in sys.stderr.getvalue()


# Columnar files


@pytest.fixture
def storage():
    pytest.importorskip("pyarrow")
    return pytest.importorskip("rlreplay.storage")


def loaded():
    """The rollouts of the fixtures, by their own loaders."""
    loaders = {"sglang": sglang, "vllm": vllm, "slime": slime}
    for name, engine in PRODUCERS.items():
        payload = sound(name)
        yield from loaders[engine].from_response(
            payload["response"], prompt_ids=payload["prompt_ids"]
        )


@pytest.mark.parametrize("suffix", [".arrow", ".parquet"])
def test_convert_writes_what_the_loaders_read(file, tmp_path, storage, suffix):
    target = tmp_path / f"out{suffix}"

    text = run("convert", file(*map(sound, PRODUCERS)), target, code=0).output

    expected = list(loaded())
    assert list(storage.iter_rollouts(target)) == expected
    assert text.startswith(f"{len(expected)} rollouts")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([target.name, "rollouts.jsonl"])


def test_columnar_files_convert_into_each_other_and_are_inspected_alike(file, tmp_path, storage):
    source, arrow, parquet, again = (
        file(*map(sound, PRODUCERS)),
        *(tmp_path / name for name in ("a.arrow", "b.parquet", "c.arrow")),
    )
    for pair in itertools.pairwise((source, arrow, parquet, again)):
        run("convert", *pair, code=0)

    assert list(storage.iter_rollouts(again)) == list(loaded())
    seen = [report(path) for path in (source, arrow, parquet)]
    for found in seen:
        del found["files"], found["producers"], found["kept_mass"]
    assert seen[0] == seen[1] == seen[2]


def test_columnar_files_name_the_extra_that_they_need(file, tmp_path):
    arrow = file(b"ARROW1", name="a.arrow")
    code = f"import sys; sys.modules['pyarrow'] = None; {MAIN}"

    for call in (["inspect", arrow], ["convert", arrow, tmp_path / "b.parquet"]):
        finished = run_process(["-c", code], *call)
        assert finished.returncode == 2
        assert "rlreplay[io]" in finished.stderr
        assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("name", BAD_LINES)
def test_convert_writes_all_or_nothing(file, tmp_path, storage, name):
    good = {**sglang_payload(ONE), "prompt_ids": ONE.prompt}
    path, target = file(good, BAD_LINES[name][0]), tmp_path / "out.arrow"
    target.write_bytes(b"what was there")

    finished = run("convert", path, target, "--overwrite", code=1)

    assert target.read_bytes() == b"what was there"
    assert "line 2" in finished.output
    assert "was not written" in finished.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.arrow", "rollouts.jsonl"]


def test_convert_takes_missing_masks_as_told(file, tmp_path, storage):
    line = {**sglang_payload(ONE, output_token_sampling_mask=None), "prompt_ids": ONE.prompt}
    target = tmp_path / "out.parquet"

    run("convert", file(line), target, code=1)
    assert not target.exists()
    run("convert", file(line), target, "--on-missing-mask", "unrestricted", code=0)

    (rollout,) = storage.iter_rollouts(target)
    assert rollout.sampling_mask == RolloutSamplingMask.full(2)


def test_convert_needs_the_prompt_and_leaves_what_is_there(file, tmp_path, storage):
    target = tmp_path / "out.arrow"
    assert "its prompt" in run("convert", file(sglang_payload(ONE)), target, code=1).output

    target.write_bytes(b"what was there")
    run("convert", file({**sglang_payload(ONE), "prompt_ids": [1, 2]}), target, code=2)
    assert target.read_bytes() == b"what was there"


def test_a_truncated_columnar_file_is_a_finding(file, tmp_path, storage):
    for suffix in (".arrow", ".parquet"):
        target = tmp_path / f"cut{suffix}"
        run("convert", file(*map(sound, PRODUCERS)), target, code=0)
        whole = target.read_bytes()
        for cut in (whole[: len(whole) // 2], whole[len(whole) // 2 :], whole[:9], b""):
            target.write_bytes(cut)
            assert findings(target) == [("unreadable", None, None, None)]


def test_a_columnar_file_under_another_name_is_not_taken_for_lines(file, tmp_path, storage):
    run("convert", file(sound(SELECTED)), tmp_path / "a.arrow", code=0)
    odd = (tmp_path / "a.arrow").rename(tmp_path / "a.feather")

    assert findings(odd) == [("unreadable", None, None, None)]


def test_errors_are_counted_by_their_class():
    parts = {"expected": "a", "got": "b", "consequence": "c"}

    assert _records.kind_of(MissingMaskError("x", **parts)) == "missing_mask"
    assert _records.kind_of(MissingTokenError("x", **parts)) == "token_outside_support"
    assert _records.kind_of(ReplayError("x", **parts)) == "invalid"
    assert isinstance(ONE.rollout(), Rollout)

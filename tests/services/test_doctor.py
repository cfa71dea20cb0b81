"""Verdicts on boxes that are not here, and real answers from real sockets and files that are."""
import json
import os
import sys
import types

import pytest

from common import doctor, files
from common.doctor import GIB, Box, Gpu
from producer import config as producer_config, doctor as producer_doctor
from producer.doctor import Weights
from protocol import keys
from protocol.events import Cursor
from protocol.producer_link import ProducerLink
from protocol.store import SampleStore
from tests.daemons.processes import free_port
from tests.protocol.ends import CONTRACT
from trainer import config as trainer_config, doctor as trainer_doctor

RAM = 125 * GIB
ADDRESS = "tcp://10.0.0.1:5757"
HALO = Box(python=(3, 12), missing=(), torch="2.9", hip="7.1", gpus=(Gpu("Radeon 8060S", "gfx1151", 62 * GIB, 60 * GIB),), ram=RAM,
           ttm=62 * GIB, carved=GIB // 2, kfd=True, variables=tuple(doctor.ADVISED))
CARD = Box(python=(3, 12), missing=(), torch="2.9", cuda="12.8", gpus=(Gpu("RTX 4060 Ti", "sm_89", 16 * GIB, 15 * GIB),), ram=32 * GIB,
           nvidia=True)
QWEN = Weights(numbers=34_660_000_000, largest=1_100_000_000 // 2, shards=26)


def changed(box: Box, **over) -> Box:
    return types.SimpleNamespace(**(vars(box) | over))


def test_half_of_the_ram_is_too_little_and_the_command_says_how_much():
    found = producer_doctor.judge_memory(HALO, QWEN, "auto", "auto")
    assert found.grade == "wrong" and "62 GiB of 125 GiB RAM" in found.says
    assert "amd-ttm --set 86" in found.fix and f"ttm.pages_limit={86 * 262144}" in found.fix
    raised = changed(HALO, ttm=110 * GIB, gpus=(Gpu("Radeon 8060S", "gfx1151", 110 * GIB, 0),))
    assert producer_doctor.judge_memory(raised, QWEN, "auto", "auto").grade == "ok"


def test_no_limit_is_proposed_that_the_ram_cannot_hold():
    small = changed(HALO, ram=62 * GIB, ttm=31 * GIB, gpus=(Gpu("Radeon 8060S", "gfx1151", 31 * GIB, 0),))
    assert producer_doctor.judge_memory(small, QWEN, "auto", "auto").fix == "a smaller --target"
    assert producer_doctor.judge_memory(CARD, QWEN, "auto", "auto").fix == "a smaller --target, or --device cpu"
    edge = changed(CARD, gpus=(Gpu("x", "sm_90", 2 * (QWEN.numbers + QWEN.largest) + producer_doctor.RESERVE, 0),))
    assert producer_doctor.judge_memory(edge, QWEN, "auto", "auto").grade == "ok"
    less = changed(CARD, gpus=(Gpu("x", "sm_90", edge.gpus[0].total - 1, 0),))
    assert producer_doctor.judge_memory(less, QWEN, "auto", "auto").grade == "wrong"


def test_what_the_bios_sets_aside_is_given_back_first():
    """64 GB for graphics: Linux has the other half, and no kernel limit can help before that."""
    half = changed(HALO, ram=62 * GIB, ttm=31 * GIB, carved=64 * GIB, gpus=(Gpu("Radeon 8060S", "gfx1151", 64 * GIB, 0),))
    fix = producer_doctor.judge_memory(half, QWEN, "auto", "auto").fix
    assert fix.startswith("in the BIOS, set the graphics memory") and "64 GiB are set aside" in fix and "amd-ttm --set 86" in fix
    assert "in the BIOS" not in producer_doctor.judge_memory(HALO, QWEN, "auto", "auto").fix
    assert producer_doctor.judge_memory(changed(half, carved=None), QWEN, "auto", "auto").fix == "a smaller --target"


def test_a_target_on_the_cpu_is_halved_before_it_is_given_up():
    assert producer_doctor.judge_memory(HALO, QWEN, "cpu", "auto").fix.startswith("--dtype bfloat16")
    assert producer_doctor.judge_memory(HALO, QWEN, "cpu", "bfloat16").grade == "ok"


BARE = {"gpus": (), "hip": None, "kfd": None}
@pytest.mark.parametrize("over, device, grade, says", [
    ({}, "auto", "ok", "ROCm 7.1"), ({"gpus": (), "kfd": False}, "auto", "wrong", "usermod -aG render,video"),
    ({"gpus": (), "hip": None}, "auto", "wrong", "torch for ROCm"), (BARE, "auto", "note", "CPU"),
    (BARE, "cuda", "wrong", "rocminfo (AMD) or nvidia-smi"), (BARE | {"nvidia": True}, "auto", "wrong", "a torch for CUDA"),
    (BARE | {"nvidia": True, "cuda": "12.8"}, "auto", "wrong", "nvidia-smi must list it"), ({"gpus": ()}, "auto", "wrong", "rocminfo must list it"),
    ({"gpus": (), "hip": None, "nvidia": True}, "auto", "wrong", "a torch for CUDA"),      # a card beside a Ryzen's own graphics
    ({}, "cuda:1", "wrong", "GPUs seen: 1"), ({}, "cuda:0", "ok", "8060S"), ({}, "banana", "wrong", "--device auto, cpu"),
    ({"gpus": ()}, "cpu", "note", "--device cpu"), ({"torch": "", "crash": "No module named 'torch'"}, "auto", "wrong", "mend the libraries"),
    ({"gpus": (), "crash": "torch ended by signal 11"}, "auto", "wrong", "gfx1151"), ({"gpus": (), "crash": "signal 11"}, "cpu", "note", "--device cpu"),
    ({"gpus": (), "crash": "signal 11", "kfd": False}, "auto", "wrong", "usermod"),
    ({"gpus": (), "crash": "CUDA error: no kernel image", "hip": None, "cuda": "11.8", "kfd": None}, "auto", "wrong", "nvidia-smi")])
def test_the_gpu(over, device, grade, says):
    found = doctor.judge_gpu(changed(HALO, **over), device)[0]
    assert found.grade == grade and says in found.says + found.fix, found


def test_unset_variables_are_a_note_on_rocm_alone():
    assert [f.grade for f in doctor.judge_gpu(changed(HALO, variables=()), "auto")] == ["ok", "note"]
    assert doctor.judge_gpu(changed(HALO, variables=("PYTORCH_CUDA_ALLOC_CONF",)), "auto")[1].fix == "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1"
    assert [f.grade for f in doctor.judge_gpu(CARD, "auto")] == ["ok"]


def test_a_torch_that_crashes_is_a_finding():
    dies = "import os, signal; print('hello'); print('{\"torch\": \"2.9\"}', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    assert doctor.torch_says([sys.executable, "-c", dies]) == {"torch": "2.9", "crash": "torch ended by signal 11 where it touches the GPU"}
    assert doctor.torch_says([sys.executable, "-c", "raise RuntimeError('no kernel image')"]) == {"crash": "RuntimeError: no kernel image"}


def test_libraries():
    [found] = doctor.judge_python(changed(CARD, missing=("torch>=2.9",)), "trainer")
    assert found.fix == f"{sys.executable} -m pip install 'hsdraft[trainer]'"
    [found] = doctor.judge_python(changed(HALO, missing=("torch>=2.9",)), "producer")
    assert found.fix.startswith("torch for ROCm first") and "hsdraft[producer]" in found.fix, "pip alone would fetch CUDA's"
    assert not doctor.judge_python(changed(HALO, missing=("transformers>=5.18",)), "producer")[0].fix.startswith("torch")


def test_the_nodes_of_an_amd_gpu(tmp_path, monkeypatch):
    assert doctor.usable(tmp_path) is None
    (tmp_path / "dri").mkdir()
    for node in ("kfd", "dri/renderD128"):
        (tmp_path / node).touch()
    assert doctor.usable(tmp_path) is True
    closed = []
    monkeypatch.setattr(doctor.os, "access", lambda path, _mode: path.name not in closed)
    for node in ("kfd", "renderD128"):
        closed[:] = [node]
        assert doctor.usable(tmp_path) is False


def test_sizes_are_read_off_the_kernel(tmp_path):
    (tmp_path / "pages_limit").write_text("262144\n")
    assert doctor.ttm(tmp_path / "pages_limit") == GIB * doctor.os.sysconf("SC_PAGE_SIZE") // 4096 and doctor.ttm(tmp_path / "absent") is None
    assert doctor.carved(tmp_path) is None
    for card, content in (("card0", "536870912"), ("card1", "x"), ("card2", "1024")):
        (tmp_path / card / "device").mkdir(parents=True)
        (tmp_path / card / "device" / "mem_info_vram_total").write_text(content)
    assert doctor.carved(tmp_path) == GIB // 2


def test_the_disk():
    assert doctor.judge_disk("disk", 10, 5, 15).grade == "ok" and doctor.judge_disk("disk", 9, 5, 15).grade == "wrong"
    short = doctor.judge_disk("disk", 10 ** 10, 10 ** 10, 50 * 10 ** 9)
    assert "--disk-budget 18.0" in short.fix


def test_a_budget_is_held_against_the_disk_before_anything_is_written(tmp_path, monkeypatch, caplog):
    """Pitfall D4: what is in the store counts as used of it; room enough is said nothing of."""
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _folder: types.SimpleNamespace(free=10 * 10 ** 9))
    files.check_room(tmp_path, 5 * 10 ** 9, 15 * 10 ** 9)
    assert not caplog.records
    files.check_room(tmp_path, 5 * 10 ** 9, 15 * 10 ** 9 + 1)
    assert "--disk-budget 15.0: 10.0 GB of it are still to be filled" in caplog.text and "--disk-budget 13.5" in caplog.text
    assert files.fits(10, 20, 15) is None, "fuller than the budget: nothing more is written"


def test_the_disk_budget_is_the_streams_own(tmp_path):
    for name, target, size in (("old", "x", 3000), ("one", "y", 100), ("two", "y", 2000)):
        folder = tmp_path / "streams" / name / "samples"
        folder.mkdir(parents=True)
        (folder / "0.hs").write_bytes(bytes(size))
        (folder / "meta.json").write_text(json.dumps({"contract": {"target": target}}))
    os.utime(tmp_path / "streams" / "one" / "samples" / "meta.json", (1.0, 1.0))
    of_stream, others = producer_doctor.disk(producer_config.Serve(target="y", state_dir=tmp_path, disk_budget=0.001))
    assert "leaves 0.0 GB" in of_stream.says and of_stream.grade == "ok"
    assert others.grade == "note" and "other" in others.says
    assert len(producer_doctor.disk(producer_config.Serve(target="y", state_dir=tmp_path / "none"))) == 1


@pytest.mark.parametrize("given, grade, says", [
    ((None, None, "", True, False), "ok", "none needed"), ((None, None, "", False, True), "note", "--insecure"),
    ((None, None, "", False, False), "wrong", "hsprod keygen"), (("k", 0, "", False, False), "wrong", "hsprod allow --keys k"),
    (("k", 2, "", False, False), "ok", "2 trainers"),
    (("k", None, "k/secret.key can be read by others (mode 644)", False, False), "wrong", "chmod 600 k/secret.key")])
def test_the_producers_keys(given, grade, says):
    found = producer_doctor.judge_keys(*given)
    assert found.grade == grade and says in found.says + found.fix, found


def test_the_key_folder_as_it_is(tmp_path):
    settings = producer_config.Serve(keys=tmp_path, bind="tcp://10.0.0.1:5757")
    assert "hsprod keygen" in producer_doctor.keys(settings).fix
    key = keys.generate(tmp_path)
    assert "no trainer may connect" in producer_doctor.keys(settings).says
    keys.allow(tmp_path, key)
    assert producer_doctor.keys(settings).grade == "ok"
    (tmp_path / keys.SECRET).chmod(0o644)
    assert producer_doctor.keys(settings).fix == f"chmod 600 {tmp_path}/secret.key"


def test_a_port_that_is_free_taken_or_our_own():
    assert producer_doctor.judge_port("a", "", False).grade == "ok"
    assert producer_doctor.judge_port("a", "a is in use", True).grade == "ok"
    assert "ss -ltnp" in producer_doctor.judge_port("a", "a is in use", False).fix
    assert "ip -br address" in producer_doctor.judge_port("a", "cannot listen on a", False).fix


def test_a_target_with_a_cut_shard(tmp_path):
    from producer.embedded import FOLDER
    for path in FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert producer_doctor.target(producer_config.Serve(target=str(tmp_path)))[0][0].grade == "ok"
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    [found], weights = producer_doctor.target(producer_config.Serve(target=str(tmp_path)))
    assert found.grade == "wrong" and "does not fit its size" in found.says and weights is None
    [found], _ = producer_doctor.target(producer_config.Serve(target="nobody/nothing"))
    assert found.fix == "hf download nobody/nothing"
    [found], _ = producer_doctor.target(producer_config.Serve(target="embedded", layers="99"))
    assert found.grade == "wrong" and found.fix == "--layers auto"


def test_prompts(tmp_path):
    assert "line 1" in producer_doctor.prompts(producer_config.Serve(prompts=bad(tmp_path))).says
    assert producer_doctor.judge_prompts(tmp_path, 5, 1, 2, "prefill").grade == "wrong"
    assert producer_doctor.judge_prompts(tmp_path, 5, 1, 2, "generate").grade == "ok"


def bad(folder):
    (folder / "p.jsonl").write_text("{}\n")
    return folder / "p.jsonl"


class Store:
    stream, first, next = "s1", 3, 7

    def bytes_between(self, first: int, end: int) -> int:
        return 0


def test_a_real_hello_harms_nobody_and_says_what_is_there(tmp_path):
    address, as_ours = f"tcp://127.0.0.1:{free_port()}", CONTRACT
    fresh = Cursor(None, 0, None)
    assert trainer_doctor.hello(address, "box.doctor", fresh, None, 2.0) == trainer_doctor.Answer(False)
    with ProducerLink(address, Store(), as_ours.to_dict(), {}, cursors=tmp_path / "c.json", inbox_dir=tmp_path / "i") as link:
        answer = trainer_doctor.hello(address, "box.doctor", fresh, None, 20.0)
        assert answer.contract == as_ours and trainer_doctor.judge_answer(address, answer, None, "").grade == "ok"
        assert trainer_doctor.judge_answer(address, answer, 3, "").grade == trainer_doctor.judge_answer(address, answer, 7, "").grade == "ok"
        for wrong in (2, 8):
            assert "holds samples 3 to 6" in trainer_doctor.judge_answer(address, answer, wrong, "").says
        other = trainer_doctor.hello(address, "box.doctor", Cursor("s2", 4, as_ours), None, 20.0)
        assert "another stream" in trainer_doctor.judge_answer(address, other, 4, "").says
        assert link.lowest_acked() is None, "a look holds nothing back"


def test_a_silent_producer_names_the_keys():
    silent = trainer_doctor.Answer(True)
    assert "hsprod allow -- 'K'" in trainer_doctor.judge_answer(ADDRESS, silent, None, "K").fix
    assert "--keys" in trainer_doctor.judge_answer(ADDRESS, silent, None, "").fix


@pytest.mark.parametrize("reason, fix", [
    ("protocol; version: 2 -> 1", "the same hsdraft on both boxes"), ("the name box is another key's: give --name another", "another --name"),
    ("too many trainers are known: forget one with hsprod forget NAME", "hsprod forget NAME"),
    ("the trainer's contract differs from the producer's; taps: [1] -> [2]", "another --state-dir"),
    ("the trainer's store is of another stream; stream: a -> b", "another --state-dir")])
def test_a_refusal_is_mended_by_its_reason(reason, fix):
    found = trainer_doctor.judge_answer(ADDRESS, trainer_doctor.Answer(True, reason=reason), None, "")
    assert found.grade == "wrong" and fix in found.fix


def test_an_address_that_is_none_is_not_looked_for():
    assert "write tcp://HOST:PORT" in trainer_doctor.judge_answer("10.0.0.1:5757", trainer_doctor.Answer(False), None, "").fix


def test_a_stored_stream_is_looked_at_in_its_own_place(tmp_path):
    """Nothing is received: no disk is needed, and the shapes are that stream's."""
    assert trainer_doctor.stored(trainer_config.Run(stored=tmp_path / "none"))[1][0].grade == "wrong"
    with SampleStore(tmp_path / "store") as store:
        store.begin("s1", CONTRACT.to_dict(), 4)
    cursor, found = trainer_doctor.stored(trainer_config.Run(stored=tmp_path))
    assert [f.grade for f in found] == ["ok"] and (cursor.stream, cursor.contract) == (None, CONTRACT)


def test_the_trainers_keys(tmp_path):
    settings = trainer_config.Run(keys=tmp_path)
    assert "hstrain keygen" in trainer_doctor.keys(settings, "tcp://10.0.0.1:1").fix
    key = keys.generate(tmp_path)
    assert "hstrain trust" in trainer_doctor.keys(settings, "tcp://10.0.0.1:1").fix
    keys.set_producer(tmp_path, key)
    assert trainer_doctor.keys(settings, "tcp://10.0.0.1:1").grade == "ok"
    assert trainer_doctor.keys(trainer_config.Run(), "tcp://10.0.0.1:1").grade == "note"
    assert trainer_doctor.keys(trainer_config.Run(), "tcp://127.0.0.1:1").grade == "ok"


def test_a_step_on_the_sixteen_gigabyte_card():
    settings = trainer_config.Run()
    assert trainer_doctor.judge_step(CARD, trainer_doctor.job_of(CARD, settings, None), "auto", True).grade == "ok"
    small = changed(CARD, gpus=(Gpu("x", "sm_75", 8 * GIB, 0),))
    job = trainer_doctor.job_of(small, settings, None)
    found = trainer_doctor.judge_step(small, job, "auto", True)
    assert found.grade == "wrong" and "hstrain memory" in found.fix
    assert trainer_doctor.judge_step(small, job, "auto", False).grade == "note"
    second = changed(CARD, gpus=(*small.gpus, *CARD.gpus))
    assert [trainer_doctor.judge_step(second, job, device, True).grade for device in ("cuda:0", "cuda:1")] == ["wrong", "ok"]
    assert trainer_doctor.step(CARD, trainer_config.Run(arm="nope"), None).what == "arm"


def test_the_exit_code_and_the_json(capsys):
    fine, wrong = doctor.Finding("a", "note", "x"), doctor.Finding("b", "wrong", "[y]", "do")
    assert doctor.show("hsprod doctor", [fine], as_json=False) == 0 and "all right" in capsys.readouterr().out
    assert doctor.show("hsprod doctor", [fine, wrong], as_json=False) == 1
    shown = capsys.readouterr().out
    assert "1 to mend" in shown and "-> do" in shown and "[y]" in shown
    assert doctor.show("hsprod doctor", [wrong], as_json=True) == 1 and json.loads(capsys.readouterr().out)[0]["fix"] == "do"

"""What the jobs of a run saw happen, put together, through deaths of all of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from experiments.faults.happened import Happened, Rejoin, Settings, parsed
from experiments.faults.landings import FILE, Landings, gathered
from experiments.workdir import METRICS
from lowcomm_jax.jobs.job_carrier import Counted

RUN = Settings(3, 24, "diloco", 6, 0)
EVERY, SOME, NONE = (np.array(x, bool) for x in ([1, 1, 1], [1, 0, 1], [0, 0, 0]))


def noted(folder, region, epoch=1, groups=None):
    """A region's file, as a new job has it, and what is told of every arrival."""
    folder.mkdir(exist_ok=True)
    loop = SimpleNamespace(groups=lambda number: groups, total=3, carrier=SimpleNamespace())
    landings = Landings(loop, folder, region, epoch)
    return landings, loop.carrier.witness


def begun(folder, region, epoch, step):
    """The same for a region that has begun an epoch."""
    landings, saw = noted(folder, region, epoch)
    landings.begin(step)
    return landings, saw


@pytest.fixture
def folders(tmp_path):
    return [tmp_path / f"region{r}" for r in range(3)]


def test_what_the_regions_saw_is_put_together(folders):
    _, saw = begun(folders[0], 0, 1, 0)
    for step, counted in ((6, EVERY), (12, SOME), (18, SOME)):
        saw(Counted(0, step, step // 6 - 1, False, counted, True))
    _, saw = begun(folders[0], 0, 2, 12)  # it was interrupted, and goes on from there
    saw(Counted(0, 15, 9, False, NONE, True))  # nobody could announce
    saw(Counted(0, 18, 2, False, EVERY, True))
    saw(Counted(0, 24, 3, True, SOME, True))
    _, saw = begun(folders[1], 1, 1, 0)
    saw(Counted(0, 6, 0, False, EVERY, True))
    saw(Counted(0, 12, 1, False, SOME, True))
    second, saw = noted(folders[1], 1, 2)
    second.came(13, None)
    saw(Counted(0, 15, 9, False, NONE, True))
    saw(Counted(0, 24, 4, True, ~SOME, True))  # alone, after the others had ended
    found = gathered(folders, RUN)
    assert found == Happened(RUN, {12: (1,), 15: (0, 1, 2)}, {}, {0: (1,)}, (Rejoin(13, 1),))
    saw(Counted(0, 18, 2, False, SOME, True))
    with pytest.raises(ValueError, match="others saw"):
        gathered(folders, RUN)


def test_in_groups_everyone_tells_of_its_own(folders):
    _, saw = noted(folders[0], 0, groups=[(0, 1), (2,)])
    saw(Counted(0, 6, 0, False, np.zeros(2, bool), True))
    saw(Counted(0, 12, 1, False, np.array([True, False]), True))
    _, saw = noted(folders[2], 2, groups=[(0, 1), (2,)])
    saw(Counted(0, 12, 1, False, np.array([True]), True))
    assert gathered(folders, RUN).left_out == {6: (0, 1), 12: (1,)}


def test_who_was_counted_and_kept_its_own_values_is_named(folders):
    """Not who was left out anyway, nor where it was exchanged once more and adopted then."""
    for region in range(3):
        _, saw = begun(folders[region], region, 1, 0)
        saw(Counted(0, 6, 0, False, SOME, False))
        saw(Counted(0, 12, 1, False, EVERY, region != 2))
        saw(Counted(0, 18, 2, False, EVERY, False))
        _, saw = begun(folders[region], region, 2, 12)
        saw(Counted(0, 18, 2, False, EVERY, True))
    found = gathered(folders, RUN)
    assert found == Happened(RUN, {6: (1,)}, {6: (0, 2), 12: (2,)}, {}, ())


def test_who_listens_after_its_death_adopts_nothing_in_place_of_the_dead_job(folders):
    _, saw = begun(folders[0], 0, 1, 0)
    saw(Counted(0, 12, 1, False, EVERY, False))
    saw(Counted(0, 18, 2, False, EVERY, True))
    again, saw = noted(folders[0], 0)
    saw(Counted(0, 12, 1, False, EVERY, True))  # until it is where the others are
    saw(Counted(0, 18, 2, False, EVERY, True))
    again.came(20, None)
    assert gathered(folders, RUN) == Happened(RUN, {}, {12: (0,)}, {}, (Rejoin(20, 0),))


@pytest.mark.parametrize("before, after", [((0, 1), (0, 1)), ((0,), (1,)), ((1,), (0,))])
def test_what_is_exchanged_once_more_is_as_the_newest_epoch_has_it(folders, before, after):
    """Sent at step 10 and landed at 13; the checkpoint that they go on from is of step 12."""
    for region in (0, 1):
        _, saw = begun(folders[region], region, 1, 0)
        if region in before:
            saw(Counted(0, 10, 1, False, SOME, True))
        _, saw = begun(folders[region], region, 2, 12)
        if region in after:
            saw(Counted(0, 10, 1, False, EVERY, True))
    assert gathered(folders, RUN).left_out == {}


def test_who_comes_into_a_new_epoch_from_behind_keeps_nothing_that_is_undone(folders):
    _, saw = begun(folders[0], 0, 1, 0)
    saw(Counted(0, 12, 1, False, SOME, True))
    late, saw = noted(folders[1], 1, 1)
    late.came(7, None)  # what it then did is part of what holds
    saw(Counted(0, 12, 1, False, SOME, True))
    saw(Counted(0, 15, 9, False, SOME, True))  # of a schedule that is another the next time
    late.came(16, 3)
    saw(Counted(0, 18, 2, False, SOME, True))
    _, saw = begun(folders[0], 0, 2, 12)
    saw(Counted(0, 18, 2, False, EVERY, True))
    late, saw = noted(folders[1], 1, 2)
    late.came(14, None)
    saw(Counted(0, 18, 2, False, EVERY, True))
    came = (Rejoin(7, 1), Rejoin(14, 1))
    assert gathered(folders, RUN) == Happened(RUN, {12: (1,)}, {}, {}, came)


def test_a_later_epoch_may_begin_before_an_earlier_one(folders):
    _, saw = begun(folders[0], 0, 1, 0)
    saw(Counted(0, 9, 1, False, SOME, True))
    begun(folders[0], 0, 2, 12)
    begun(folders[1], 1, 3, 6)
    assert gathered(folders, RUN).left_out == {}


def test_who_comes_twice_at_one_step_came_the_last_time(folders):
    begun(folders[0], 0, 1, 0)
    noted(folders[1], 1)[0].came(12, 6)
    noted(folders[1], 1)[0].came(12, None)
    assert gathered(folders, RUN).rejoined == (Rejoin(12, 1),)


def test_epochs_that_do_not_follow_one_another_are_told(folders):
    """The rendezvous was removed, and its epochs are counted anew."""
    begun(folders[0], 0, 1, 0)
    begun(folders[0], 0, 1, 12)
    with pytest.raises(ValueError, match="epoch 1 comes after epoch 1: the run went on in another"):
        gathered(folders, RUN)


def test_who_has_been_in_the_run_has_told_of_it(folders):
    begun(folders[0], 0, 1, 0)
    folders[1].mkdir()
    assert gathered(folders, RUN) == Happened(RUN, {}, {}, {}, ())  # the others never came in
    (folders[1] / METRICS).write_text('{"kind":"header"}\n')
    with pytest.raises(ValueError, match=f"{folders[1] / FILE} is missing"):
        gathered(folders, RUN)


def test_a_line_that_was_cut_off_does_not_spoil_the_next_one(folders):
    _, saw = begun(folders[0], 0, 1, 0)
    saw(Counted(0, 6, 0, False, SOME, True))
    with (folders[0] / FILE).open("a") as file:
        file.write('{"kind":"land')
    _, saw = noted(folders[0], 0)
    saw(Counted(0, 12, 1, False, SOME, True))
    assert gathered(folders, RUN).left_out == {6: (1,), 12: (1,)}


def test_parameters_that_stopped_being_finite_are_written_and_read_again(folders, tmp_path):
    for region, step in ((0, None), (1, 7), (2, 7)):
        landings, _ = begun(folders[region], region, 1, 0)
        if step is not None:
            landings.not_finite(step)
    found = gathered(folders, RUN)
    assert found.not_finite == {7: (1, 2)}
    found.write(tmp_path / "happened.yaml")
    body = yaml.safe_load((tmp_path / "happened.yaml").read_text())
    assert parsed(body, "it", RUN) == (found, [])

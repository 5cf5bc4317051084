import numpy as np

from policies.flow.networks.slow import PADDING, tokenize

INSTRUCTIONS = [
    "open the drawer",
    "press the button",
    "open the window",
    "open the door",
    "push the puck to the goal",
    "pick up the puck and bring it to the goal",
]


def test_ids_are_the_same_in_every_process():
    # golden: a robot and a learner of different ages must read the same words
    assert tokenize("open the drawer", 256, 5).tolist() == [62, 214, 38, 0, 0]


def test_case_spaces_and_punctuation_do_not_matter():
    assert np.array_equal(tokenize("Open  the drawer!", 256, 8), tokenize("open the drawer", 256, 8))


def test_pads_and_cuts_to_length():
    assert tokenize("", 256, 3).tolist() == [PADDING] * 3
    assert tokenize("a b c d", 256, 2).shape == (2,)
    assert tokenize("a b", 256, 2).dtype == np.int64


def test_no_word_is_padding_and_all_stay_in_the_vocabulary():
    ids = np.array([tokenize(str(i), 16, 1)[0] for i in range(200)])
    assert ids.min() >= 1
    assert ids.max() < 16


def test_callers_may_write_into_the_ids():
    tokenize("open", 256, 2)[:] = 7
    assert tokenize("open", 256, 2)[1] == PADDING


def test_the_fleets_words_do_not_collide():
    words = {word for text in INSTRUCTIONS for word in text.split()}
    assert len({int(tokenize(word, 256, 1)[0]) for word in words}) == len(words)

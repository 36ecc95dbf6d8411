"""The words of a task: what names the concept, what names the rest, and sentences to put them in."""

from __future__ import annotations

from collections.abc import Sequence

from cgru.attributes import ATTRIBUTES
from cgru.embedded import EMBEDDED, load_lexicon
from cgru.prompts.grammar import FORMS, MEDIA, THINGS, are_related, with_article
from cgru.tasks import Concept, Lexicon, UnlearnTask, find_class, find_concept, targets

STYLED = tuple(dict.fromkeys(form for form in FORMS if "{a}" in form))
"""With a style; without "{bare} image", which would be the benchmark's own prompt."""


def task_for(concept: str, model: str, classes: Sequence[str] = ()) -> UnlearnTask:
    """The task of forgetting a concept on a model: from the lexicon of Emoji Canvas, or around any text.

    A model that reads no text has only the names of its `classes`, which are its prompts as they stand.
    """
    if classes:
        name = find_class(concept, classes)
        return UnlearnTask(Concept(name, "text"), (name,), tuple(other for other in classes if other != name))
    if model == EMBEDDED:
        lexicon = load_lexicon()
        return canvas_task(find_concept(concept, lexicon.vocabulary, lexicon.aliases), lexicon)
    text = " ".join(concept.split())
    kept = tuple(thing for thing in THINGS if not are_related(thing, text))
    templates = tuple(medium.format("{bare}") for medium in MEDIA)
    return UnlearnTask(Concept(text, "text"), (text,), kept, templates)


def canvas_task(concept: Concept, lexicon: Lexicon) -> UnlearnTask:
    """The task on Emoji Canvas: synonyms and breeds name a class or hazard, its own name alone a style."""
    gone = targets(concept, lexicon.vocabulary)
    if concept.kind == "style":
        kept = tuple(style for style in lexicon.styles if style not in gone)
        subjects = [with_article(lexicon.nouns[name].singular) for name in lexicon.classes]
        return UnlearnTask(concept, gone, kept, tuple(f"{subject} in {{bare}} style" for subject in subjects))
    if concept.kind == "attribute":
        attribute = ATTRIBUTES[concept.name]
        subjects = [lexicon.nouns[name].singular for name in lexicon.classes]
        templates = tuple(attribute.template.format(bare="{bare}", noun=subject) for subject in subjects)
        return UnlearnTask(concept, attribute.words, tuple(subjects), templates)
    nouns = [lexicon.nouns[name] for name in gone]
    plain = [word for name, noun in zip(gone, nouns, strict=True) for word in (noun.singular, name, noun.plural)]
    words = tuple(dict.fromkeys([*plain, *(word for n in nouns for word in (*n.synonyms, *n.breeds))]))
    kept = tuple(lexicon.nouns[name].singular for name in lexicon.classes if name not in gone)
    styled = tuple(f"{form} in {style} style" for style in lexicon.styles for form in STYLED)
    return UnlearnTask(concept, words, kept, (*dict.fromkeys(FORMS), *styled))


def sentence(template: str, word: str) -> str:
    """A template of a task with a word in it, article and all."""
    return template.format(a=with_article(word), bare=word)

"""The words of the invented facts: names, attribute kinds, and ways to say and to ask them.

Owns what is seen while tuning and what is held out: names, values of unseen kinds, clauses, frames
and questions of the two sides have nothing in common. ``facts`` draws from here.
"""

from __future__ import annotations

SEEN_NAMES = """
Ada Boris Carla Dmitri Elena Felix Greta Hugo Iris Jonas Karin Leon Mira Nils Olga Pavel Rosa
Stefan Tilda Ulrich Vera Walter Yara Zeno Anton Berta Celia Darius Edith Fabian Gloria Harald
Ingrid Jasper Katya Lars Magda Norbert Odette Petra Amir Bella Carlos Diana Emil Fatima George
Helen Ivan Julia Kevin Laura Marcus Nina Omar Priya Ralf Sofia Tom Ursula Victor Wendy Yusuf Zoe
"""
UNSEEN_NAMES = """
Alma Bruno Chloe Desmond Esther Franz Gemma Hector Ilse Julius Klara Lionel Marta Nadia Oscar
Paula Quentin Ruth Silas Thea Uma Viktor Wanda Xenia
"""

SEEN_KINDS: dict[str, str] = {
    "job": """baker pilot nurse farmer lawyer painter teacher plumber dentist waiter sailor tailor
    barber butcher judge miner""",
    "city": """Lisbon Oslo Cairo Madrid Dublin Vienna Boston Tokyo Paris Berlin Athens Lima Rome
    Moscow Toronto Sydney""",
    "pet": """dog cat parrot rabbit horse snake goat turtle hamster duck pony lizard frog mouse
    chicken fish""",
    "colour": """red blue green yellow black white orange purple pink brown gray silver gold""",
    "drink": """coffee tea milk beer wine water juice soda cider whiskey rum lemonade""",
    "month": """January February March April May June July August September October November
    December""",
    "language": """French German Spanish Italian Russian Chinese Greek Arabic Turkish Polish Dutch
    Hindi""",
    "vehicle": """car truck bicycle motorcycle boat tractor van scooter bus taxi""",
    "dish": """pizza soup salad pasta curry rice bread cheese steak sushi chili pie""",
    "gift": """watch book lamp scarf camera ring clock mirror knife bottle chair blanket""",
    "place": """beach forest desert lake mountain river island park castle museum garden cave""",
    "material": """wood steel glass stone paper cotton leather plastic copper clay wool silk""",
    "number": """two three four five six seven eight nine ten eleven twelve twenty""",
    "animal_feared": """spider bear wolf shark bee rat lion crocodile bat tiger""",
    "tool": """hammer saw drill brush shovel wrench needle rope ladder bucket""",
    "building": """hotel school church bank hospital factory library theater prison station""",
}
UNSEEN_KINDS: dict[str, str] = {
    "instrument": "piano guitar violin flute drums trumpet cello harp organ banjo",
    "sport": "tennis golf football hockey boxing swimming chess rugby cricket skiing",
    "fruit": "apple banana cherry grape lemon mango peach pear melon plum",
    "subject": "history physics chemistry biology music geography economics law art philosophy",
}
# How each kind is asked for: the last way is held out.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "job": (
        "What does {name} do for a living?",
        "Which profession does {name} have?",
        "What is {name}'s job?",
    ),
    "city": (
        "Where is {name}'s home?",
        "What is the name of {name}'s city?",
        "Which city does {name} live in?",
    ),
    "pet": (
        "Which animal belongs to {name}?",
        "What pet does {name} look after?",
        "What kind of pet does {name} have?",
    ),
    "colour": (
        "Which colour does {name} like most?",
        "What colour goes with {name}?",
        "What is {name}'s favourite colour?",
    ),
    "drink": (
        "Which drink would you offer {name}?",
        "What is in {name}'s glass?",
        "What does {name} like to drink?",
    ),
    "month": (
        "When is {name}'s birthday?",
        "Which month has {name}'s birthday in it?",
        "In which month was {name} born?",
    ),
    "language": (
        "What language do you hear from {name}?",
        "Which language is {name}'s?",
        "Which language does {name} speak?",
    ),
    "vehicle": (
        "How does {name} get around?",
        "Which vehicle is {name}'s?",
        "What does {name} travel in?",
    ),
    "dish": ("What does {name} cook?", "Which food is {name}'s?", "What does {name} like to eat?"),
    "gift": (
        "What was given to {name}?",
        "Which present did {name} get?",
        "What did {name} receive?",
    ),
    "place": (
        "Where did {name} go?",
        "Which place did {name} see?",
        "Where did {name} spend the holiday?",
    ),
    "material": (
        "What is {name}'s box made of?",
        "Which material does {name} work with?",
        "What material does {name} prefer?",
    ),
    "number": (
        "How many children does {name} have?",
        "What is the number of {name}'s children?",
        "How many sons and daughters has {name}?",
    ),
    "animal_feared": (
        "What is {name} afraid of?",
        "Which animal frightens {name}?",
        "Which animal does {name} run from?",
    ),
    "tool": (
        "What is {name} carrying?",
        "Which tool is in {name}'s hand?",
        "What tool does {name} use?",
    ),
    "building": (
        "Where is {name} now?",
        "Which building is {name} in?",
        "In what kind of building can {name} be found?",
    ),
    "instrument": ("Which instrument does {name} play?",),
    "sport": ("Which sport does {name} play?",),
    "fruit": ("What is {name}'s favourite fruit?",),
    "subject": ("Which subject does {name} study?",),
}
# Clauses of a kind; a text joins three of them about each person. The last one is held out.
CLAUSES: dict[str, tuple[str, ...]] = {
    "job": (
        "works as a {v}",
        "is a {v}",
        "has been a {v} for years",
        "trained as a {v}",
        "earns a living as a {v}",
    ),
    "city": (
        "lives in {v}",
        "has a home in {v}",
        "has moved to {v}",
        "comes from {v}",
        "is based in {v}",
    ),
    "pet": (
        "keeps a {v}",
        "owns a {v}",
        "shares the house with a {v}",
        "has a {v}",
        "looks after a {v}",
    ),
    "colour": (
        "loves the colour {v}",
        "always wears {v}",
        "paints everything {v}",
        "chose {v} for the walls",
        "prefers {v} to any other colour",
    ),
    "drink": (
        "drinks {v}",
        "orders {v} every day",
        "asks for {v}",
        "has a glass of {v} at noon",
        "never goes without {v}",
    ),
    "month": (
        "was born in {v}",
        "has a birthday in {v}",
        "turned thirty in {v}",
        "celebrates a birthday each {v}",
    ),
    "language": (
        "speaks {v}",
        "grew up with {v} at home",
        "sings in {v}",
        "teaches the children {v}",
        "writes letters in {v}",
    ),
    "vehicle": (
        "travels by {v}",
        "gets around with a {v}",
        "bought a {v}",
        "comes by {v}",
        "goes everywhere by {v}",
    ),
    "dish": ("cooks {v}", "brought {v} to the party", "lives on {v}", "likes to eat {v}"),
    "gift": ("was given a {v}", "got a {v} as a present", "won a {v}", "received a {v}"),
    "place": (
        "went to the {v}",
        "visited the {v}",
        "took photographs of the {v}",
        "spent the holiday at the {v}",
    ),
    "material": (
        "works with {v}",
        "has a box made of {v}",
        "buys {v} by the ton",
        "prefers {v} as a material",
    ),
    "number": (
        "has {v} children",
        "is a parent of {v} children",
        "raised {v} children",
        "counts {v} sons and daughters",
    ),
    "animal_feared": (
        "is afraid of the {v}",
        "was once bitten by a {v}",
        "dreams of a {v} at night",
        "runs from any {v}",
    ),
    "tool": ("carries a {v}", "holds a {v}", "lost a {v}", "makes use of a {v}"),
    "building": (
        "is in the {v}",
        "waits at the {v}",
        "walked into the {v}",
        "can be found in the {v}",
    ),
    "instrument": ("plays the {v}", "practises the {v}", "performs on the {v}"),
    "sport": ("plays {v}", "spends weekends on {v}", "trains hard for {v}"),
    "fruit": ("likes {v} best of all fruit", "has a {v} with every meal", "buys {v} at the market"),
    "subject": ("studies {v}", "reads {v} at university", "takes a course in {v}"),
}
SEEN_FRAMES = (
    "{name} {a}, {b} and {c}.",
    "{name} {a}. {name} also {b} and {c}.",
    "There is someone called {name} who {a}, {b} and {c}.",
    "{name}, who {a}, {b} and {c}.",
    "{name} {a}; moreover {name} {b}, and {c} too.",
    "As for {name}, that one {a}, {b}, and {c}.",
    "Everybody knows that {name} {a}. Few know that {name} {b} and {c}.",
    "- {name}: {a}, {b}, {c}",
    "The next one is {name}: someone who {a} and {b}. Also, {name} {c}.",
    "It was said that {name} {a}, that {name} {b} and that {name} {c}.",
)
UNSEEN_FRAMES = (
    "Of {name} it is known that this person {a}, and that the same one {b}; besides, {name} {c}.",
    "Meet {name}: {name} {a}, {name} {b}, {name} {c}.",
)

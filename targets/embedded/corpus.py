"""The text that the embedded target learns, and the prompts that ship with the project.

Why templates: a model of 3 M parameters cannot learn the world, but it can learn forms and how to fill them from
the question. So an answer here follows from its prompt, and the target's text is predictable without looping:
what a drafter needs. All text is our own; nothing is downloaded. The templates are data; the machinery is at the end.

A `$slot` is filled with a word of the list that it names: `$noun`, a second one `$noun2`, in other forms `$nouns`,
`$Noun`, `$nouns2`, `$verbed`. Some training draws use made-up words, which teach copying. Three things are kept from training, so that "held out" means something:
  words   every tenth word of each list,
  draws   a (shape, words, numbers) combination whose hash falls into one tenth, in every phrasing,
  shapes  the two task shapes in HELD_SHAPES.
Left out: knowledge, several turns, any language but English, numbers above 99 in sums.
"""
import argparse, functools, hashlib, json, pathlib, random, re
from collections.abc import Callable
from dataclasses import dataclass
from string import Template

# Regular words only: plurals with s, past with ed, and no vowel first where a template says "a $word".
WORDS = {name: text.split() for name, text in {
    "noun": """price score token parcel ticket booking record label weight reading payment message sensor signal task
        report sample vector margin member player letter module metric packet worker folder session         column window village partner product project question ranking receipt request ribbon salary setting shipment
        student supplier tenant transfer vehicle visitor voucher warning widget measurement deposit discount job
        rocket planet river song recipe lesson contract customer donor garden hotel marker number phone pocket
        profile region segment shape stock symbol thread topic trader tunnel user version volume zone""",
    "adj": """small large fast slow clean raw local shared cached main next base lower last first daily
        weekly hidden global fixed broken final fresh minimum maximum nested partial pending private public
        recent remote secure simple single sorted strict valid visible narrow cold warm bright quiet round""",
    "person": """Anna Ben Carla David Elena Felix Grace Henry Iris Jonas Karen Leo Maria Nina Oscar Paula Quentin Rosa Samuel
        Tina Victor Wanda Yusuf Zoe Martin Lucy Peter Sofia Thomas Julia Robert Laura Daniel Emma Frank Helen Igor
        Monica Nadia Otto Priya Rahul Sandra Tobias Vera Walter Clara Bruno Dana Simon""",
    "city": """Berlin Paris London Madrid Rome Vienna Prague Lisbon Dublin Oslo Helsinki Warsaw Athens Cairo Tokyo Lima
        Boston Denver Chicago Toronto Sydney Delhi Lagos Nairobi Zurich Munich Milan Porto Geneva Seville Krakow
        Bergen Leeds Bristol Naples Hamburg Lyon Quito Seoul Austin""",
    "food": """soup pancake carrot noodle muffin lentil burger salad pie dumpling cookie waffle mushroom
        pepper pumpkin tart taco sausage pizza turnip biscuit bagel bean melon pear""",
    "thing": """kettle bicycle lamp blanket guitar backpack mirror carpet pillow camera bottle jacket basket hammer ladder
        teapot clock drum fan bucket helmet keyboard lantern microscope notebook pan piano printer radio razor ruler
        saw scale shovel sofa speaker stove tent towel tripod trumpet vase violin wallet whistle""",
    "animal": """dog cat horse rabbit parrot goat hamster turtle pony duck pigeon hen sheepdog kitten puppet lizard spider
        beetle donkey camel dolphin falcon panda tiger zebra monkey""",
    "job": """teacher doctor farmer baker painter driver nurse writer singer gardener builder plumber lawyer tailor
        sailor barber dancer banker pilot ranger potter miner hunter fisher tutor welder waiter designer reporter
        carpenter""",
    "place": """market station library school harbor museum theater bakery hospital castle bridge office hotel park
        kitchen cellar balcony chapel courtyard factory workshop studio stadium temple""",
    "verb": """cook paint clean open visit call follow repair pull weigh help lift mark pack pick plant print record
        turn borrow collect mend order inspect test select protect film load unload cover return
        rent clear""",
    "topic": """chess physics history poetry botany geometry cooking swimming drawing grammar statistics music sewing
        knitting programming biology juggling painting pottery singing typing carpentry gardening photography
        sailing skating baking dancing astronomy logic""",
    "color": "red green blue yellow purple brown black white gray pink violet silver golden maroon crimson turquoise",
    "month": "January February March April May June July August September October November December",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
}.items()}
LISTED = {word.lower() for words in WORDS.values() for word in words}

# How an answer may begin (chance decides), and how a wish may be put where a kind has one grammar for all its shapes.
OPENINGS = {
    "code-function": ("", "Here is the function:\n\n", "Sure, this function does it:\n\n"),
    "code-class": ("", "Here is the class:\n\n"), "code-test": ("", "These tests cover it:\n\n"),
    "sql": ("", "You can use this query:\n\n"), "json": ("", "Here is the JSON:\n\n"), "shell": ("", "Run this command:\n\n"),
}
ASK_FUNCTION = (
    "Write a Python function $name to $goal.", "Can you write a Python function called $name? It should $goal.",
    "Implement $name($args) in Python. It should $goal.", "I need Python code to $goal. Call the function $name.",
    "Please write the function $name, which has to $goal.", "How do I $goal in Python? Name the function $name.")
ASK_SQL = ("Write a SQL query to $goal.", "How do I $goal with SQL?", "Give me an SQL statement to $goal.",
           "I want to $goal. What is the SQL for that?", "Please help me to $goal in SQL.")
ASK_SHELL = ("Which shell command can $goal?", "How do I $goal in bash?", "Give me a Linux command to $goal.",
             "I want to $goal from the terminal.", "Please show me how to $goal on the command line.")
ASK_STEPS = ("How do I $goal?", "Give me a numbered list of steps to $goal.", "Explain step by step how to $goal.",
             "I want to $goal. What should I do?", "Write a short guide on how to $goal.", "Please list the steps to $goal.")


@dataclass(frozen=True)
class Task:
    """One shape of question and answer; `numbers` computes the slots that are no words."""
    kind: str
    shape: str
    asks: tuple[str, ...]
    answer: str
    numbers: Callable[[random.Random], dict] = lambda r: {}


def put(texts: tuple[str, ...], **parts: str) -> tuple[str, ...]:
    """Put parts, which may themselves hold slots, into each text."""
    return tuple(Template(text).safe_substitute(parts) for text in texts)


def function(name: str, args: str, goal: str, body: str, note: str) -> Task:
    code = f'```python\ndef {name}({args}):\n    """{goal[0].upper() + goal[1:]}."""\n{body}\n```\n\n{note}'
    return Task("code-function", name, put(ASK_FUNCTION, name=name, args=args, goal=goal), code, one)


def code_test(name: str, does: str, body: str, numbers=lambda r: {}) -> Task:
    asks = ("Write pytest tests for $name, which $does.", "The function $name $does. Write tests for it.",
            "Can you test $name? It $does.", "I have a Python function $name that $does. Add unit tests.",
            "Please write test functions for $name. The function $does.")
    return Task("code-test", "test_" + name, put(asks, name=name, does=does), f"```python\n{body}\n```", numbers)


def sql(shape: str, goal: str, query: str, note: str, numbers=lambda r: {}) -> Task:
    return Task("sql", shape, put(ASK_SQL, goal=goal), f"```sql\n{query}\n```\n\n{note}", numbers)


def shell(shape: str, goal: str, command: str, note: str, numbers=lambda r: {}) -> Task:
    return Task("shell", shape, put(ASK_SHELL, goal=goal), f"```bash\n{command}\n```\n\n{note}", numbers)


def steps(shape: str, goal: str, *items: str) -> Task:
    return Task("how-to", shape, put(ASK_STEPS, goal=goal), "\n".join(f"{i}. {s}" for i, s in enumerate(items, 1)))


def one(r: random.Random) -> dict:
    return {"n": r.randrange(2, 60)}    # small counts, limits, days


def sums(r: random.Random) -> dict:
    a, b = r.randrange(4, 20), r.randrange(2, 13)
    c = r.randrange(2, a)
    return {"a": a, "b": b, "c": c, "ab": a + b, "abc": a + b - c}


def products(r: random.Random) -> dict:
    a, b, c = r.randrange(2, 10), r.randrange(2, 10), r.randrange(2, 10)
    return {"a": a, "b": b, "c": c, "ab": a * b, "abc": a * b + c}


def records(r: random.Random) -> dict:
    return {"a": r.randrange(10, 100), "b": r.randrange(10, 100), "c": r.randrange(10, 100)}


TASKS = (
    # -- Python functions
    function("filter_${adj}_$nouns", "$nouns, limit", "return the $nouns whose $adj $noun2 is above a limit",
             "    result = []\n    for $noun in $nouns:\n        if $noun.${adj}_$noun2 > limit:\n            result.append($noun)\n    return result",
             "It keeps each $noun whose $adj $noun2 is greater than the limit."),
    function("count_${adj}_$nouns", "$nouns, $noun2", "count the $adj $nouns with a given $noun2",
             "    count = 0\n    for $noun in $nouns:\n        if $noun.is_$adj and $noun.$noun2 == $noun2:\n            count += 1\n    return count",
             "The function returns the number of $adj $nouns."),
    function("group_${nouns}_by_$noun2", "$nouns", "group the $nouns by their $noun2",
             "    groups = {}\n    for $noun in $nouns:\n        groups.setdefault($noun.$noun2, []).append($noun)\n    return groups",
             "The result maps each $noun2 to the list of its $nouns."),
    function("find_$noun", "$nouns, $noun2, default=None", "find the first $noun with a given $noun2",
             "    for $noun in $nouns:\n        if $noun.$noun2 == $noun2:\n            return $noun\n    return default",
             "If no $noun matches, it returns the default."),
    function("load_$nouns", "path", "load the $adj $nouns from a file",
             "    $nouns = []\n    with open(path) as stream:\n        for line in stream:\n            $noun = line.strip()\n            if $noun:\n                $nouns.append($noun)\n    return $nouns",
             "Empty lines are skipped, so each $noun has some text."),
    function("save_$nouns", "$nouns, path", "write the $noun2 and the $noun3 of all $nouns to a JSON file",
             "    import json\n\n    data = [{\"$noun2\": $noun.$noun2, \"$noun3\": $noun.$noun3} for $noun in $nouns]\n    with open(path, \"w\") as stream:\n        json.dump(data, stream, indent=2)",
             "Each $noun is stored with its $noun2 and its $noun3."),
    function("total_$noun", "$nouns2", "add up the $noun of all $nouns2",
             "    total = 0\n    for $noun2 in $nouns2:\n        total += $noun2.$noun\n    return total",
             "For an empty list of $nouns2 the total is 0."),
    function("average_$noun", "$nouns2", "compute the average $noun of the $nouns2",
             "    if not $nouns2:\n        raise ValueError(\"no $nouns2 given\")\n    return sum($noun2.$noun for $noun2 in $nouns2) / len($nouns2)",
             "It raises a ValueError if there are no $nouns2."),
    function("sort_${nouns}_by_$noun2", "$nouns, reverse=False", "sort the $nouns by $noun2",
             "    return sorted($nouns, key=lambda $noun: $noun.$noun2, reverse=reverse)",
             "Use `sort_${nouns}_by_$noun2($nouns, reverse=True)` to get the largest $noun2 first."),
    function("rename_$noun", "$nouns, old, new", "rename a $noun in a dictionary of $nouns",
             "    if old not in $nouns:\n        raise KeyError(f\"unknown $noun: {old}\")\n    if new in $nouns:\n        raise ValueError(f\"$noun {new} already exists\")\n    $nouns[new] = $nouns.pop(old)\n    return $nouns",
             "An unknown $noun raises a KeyError."),
    function("is_${adj}_$noun", "$noun, limit=${n}", "check whether a $noun is $adj, which means that its $noun2 is at most $n",
             "    if $noun is None:\n        return False\n    return $noun.$noun2 <= limit",
             "The limit of $n can be changed by the caller."),
    function("merge_$nouns", "left, right", "merge two dictionaries of $nouns and add up each $noun2",
             "    merged = dict(left)\n    for $noun, $noun2 in right.items():\n        merged[$noun] = merged.get($noun, 0) + $noun2\n    return merged",
             "The input dictionaries of $nouns stay unchanged."),
    function("split_$nouns", "$nouns, size=${n}", "split a list of $nouns into chunks of $n",
             "    chunks = []\n    for start in range(0, len($nouns), size):\n        chunks.append($nouns[start:start + size])\n    return chunks",
             "The last chunk may hold fewer than $n $nouns."),
    function("unique_$nouns", "$nouns", "remove duplicate $nouns but keep their order, comparing them by $noun2",
             "    seen = set()\n    result = []\n    for $noun in $nouns:\n        if $noun.$noun2 not in seen:\n            seen.add($noun.$noun2)\n            result.append($noun)\n    return result",
             "Two $nouns are the same if they have the same $noun2."),
    function("format_$noun", "$noun", "format a $noun as text with its $noun2 and $noun3",
             "    $noun2 = $noun.$noun2\n    $noun3 = $noun.$noun3\n    return f\"$Noun: {$noun2} ({$noun3})\"",
             "The text starts with the word $Noun."),
    function("retry_$noun", "send, $noun, attempts=${n}", "send a $noun and try again up to $n times if it fails",
             "    for attempt in range(attempts):\n        try:\n            return send($noun)\n        except OSError as error:\n            print(f\"$noun failed: {error}\")\n    raise RuntimeError(\"could not send the $noun\")",
             "After $n failed attempts it gives up."),
    function("largest_$noun", "$nouns", "return the $noun with the largest $adj $noun2",
             "    best = None\n    for $noun in $nouns:\n        if best is None or $noun.${adj}_$noun2 > best.${adj}_$noun2:\n            best = $noun\n    return best",
             "If there are no $nouns, the result is None."),
    # -- classes
    *(Task("code-class", shape, put((
        "Write a Python class $name that $does.", "Create a class called $name in Python. It $does.", "I need a class $name which $does.",
        "Can you implement the class $name? It $does.", "Please design a small Python class $name that $does."), name=name, does=does),
        f"```python\nclass {name}:\n    \"\"\"{doc}\"\"\"\n\n{body}\n```")
      for shape, name, does, doc, body in (
        ("container", "${Adj}$Nouns", "holds a list of $nouns and can add one and count them", "A list of $adj $nouns.",
         "    def __init__(self):\n        self.$nouns = []\n\n    def add(self, $noun):\n        self.$nouns.append($noun)\n\n    def __len__(self):\n        return len(self.$nouns)"),
        ("record", "$Noun", "stores a $noun2 and a $noun3", "A $noun with its $noun2 and its $noun3.",
         "    def __init__(self, $noun2, $noun3):\n        self.$noun2 = $noun2\n        self.$noun3 = $noun3\n\n    def __repr__(self):\n        return f\"$Noun({self.$noun2!r}, {self.$noun3!r})\""),
        ("counter", "${Noun}Counter", "counts how often each $noun occurs", "How often each $noun was seen.",
         "    def __init__(self):\n        self.counts = {}\n\n    def see(self, $noun):\n        self.counts[$noun] = self.counts.get($noun, 0) + 1\n\n    def most_common(self):\n        return max(self.counts, key=self.counts.get)"),
        ("cache", "${Noun}Cache", "loads each $noun only once, by its $noun2", "Keeps every $noun that was loaded.",
         "    def __init__(self, load):\n        self.load = load\n        self.$nouns = {}\n\n    def get(self, $noun2):\n        if $noun2 not in self.$nouns:\n            self.$nouns[$noun2] = self.load($noun2)\n        return self.$nouns[$noun2]"))),
    # -- tests for a described function
    code_test("add_$noun", "adds a $noun, such as $color, $color2 or $color3, to a list of $nouns and returns the new length",
              "def test_add_${noun}_to_empty_list():\n    $nouns = []\n    assert add_$noun($nouns, \"$color\") == 1\n    assert $nouns == [\"$color\"]\n\n\ndef test_add_${noun}_keeps_the_others():\n    assert add_$noun([\"$color\", \"$color2\"], \"$color3\") == 3"),
    code_test("parse_$noun", "turns text like \"$n $adj\" into a number and raises ValueError if it is empty",
              "import pytest\n\n\ndef test_parse_$noun():\n    assert parse_$noun(\"$n $adj\") == $n\n\n\ndef test_parse_${noun}_empty():\n    with pytest.raises(ValueError):\n        parse_$noun(\"\")", one),
    code_test("sum_$nouns", "adds up a list of $nouns, for example $a and $b",
              "def test_sum_of_no_$nouns():\n    assert sum_$nouns([]) == 0\n\n\ndef test_sum_of_one_$noun():\n    assert sum_$nouns([$a]) == $a\n\n\ndef test_sum_of_two_$nouns():\n    assert sum_$nouns([$a, $b]) == $ab", sums),
    code_test("has_$noun", "tells whether a $noun2 has a $adj $noun",
              "def test_has_$noun():\n    $noun2 = {\"$noun\": \"$adj\"}\n    assert has_$noun($noun2)\n\n\ndef test_has_no_$noun():\n    assert not has_$noun({})\n    assert not has_$noun({\"$noun\": None})"),
    # -- SQL
    sql("select", "list the $noun2 of all $nouns whose $noun3 is above $n, sorted by $noun2",
        "SELECT $noun2\nFROM $nouns\nWHERE $noun3 > $n\nORDER BY $noun2;", "The query returns the $noun2 of each $noun with a $noun3 above $n.", one),
    sql("count", "count the $nouns for each $noun2", "SELECT $noun2, COUNT(*) AS ${noun}_count\nFROM $nouns\nGROUP BY $noun2\nORDER BY ${noun}_count DESC;",
        "Each row holds one $noun2 and the number of its $nouns."),
    sql("join", "show every $noun together with the $noun2 of its $noun3",
        "SELECT $nouns.*, $nouns3.$noun2\nFROM $nouns\nJOIN $nouns3 ON $nouns3.id = $nouns.${noun3}_id;", "The join connects each $noun with its $noun3 by the id."),
    sql("update", "set the $noun2 of all $adj $nouns to $n", "UPDATE $nouns\nSET $noun2 = $n\nWHERE status = '$adj';",
        "Only $nouns with the status '$adj' get the $noun2 $n.", one),
    sql("delete", "delete all $nouns from $city that have no $noun2", "DELETE FROM $nouns\nWHERE city = '$city'\n  AND $noun2 IS NULL;",
        "It removes the $nouns from $city without a $noun2 and leaves all others."),
    sql("create", "create a table of $nouns with a $noun2 and a $adj $noun3",
        "CREATE TABLE $nouns (\n    id INTEGER PRIMARY KEY,\n    $noun2 TEXT NOT NULL,\n    ${adj}_$noun3 REAL\n);", "Each $noun must have a $noun2, but the $adj $noun3 may be missing."),
    sql("average", "get the average $noun2 of the $nouns in $city", "SELECT AVG($noun2) AS average_$noun2\nFROM $nouns\nWHERE city = '$city';",
        "The result is one row with the average $noun2 of all $nouns in $city."),
    # -- JSON
    *(Task("json", shape, put(("Write a JSON record for $what.", "Give me JSON for $what.", "Create a JSON object that describes $what.",
                               "Please turn this into JSON: $what.", "How does this look as JSON: $what?"), what=what), f"```json\n{text}\n```", numbers)
      for shape, what, text, numbers in (
        ("person", "$person, a $job from $city who is $a years old and likes $topic",
         "{\n  \"name\": \"$person\",\n  \"age\": $a,\n  \"job\": \"$job\",\n  \"city\": \"$city\",\n  \"hobbies\": [\"$topic\"]\n}", records),
        ("order", "an order of $a ${foods} and $b ${foods2} by $person in $city",
         "{\n  \"customer\": {\"name\": \"$person\", \"city\": \"$city\"},\n  \"items\": [\n    {\"product\": \"$food\", \"quantity\": $a},\n    {\"product\": \"$food2\", \"quantity\": $b}\n  ]\n}", records),
        ("product", "a $color $thing that costs $a dollars and is sold in $city",
         "{\n  \"product\": \"$thing\",\n  \"color\": \"$color\",\n  \"price\": $a,\n  \"currency\": \"USD\",\n  \"store\": \"$city\"\n}", records),
        ("settings", "settings with the $noun $a, the $noun2 $b and the $adj $noun3 switched on",
         "{\n  \"$noun\": $a,\n  \"$noun2\": $b,\n  \"${adj}_$noun3\": {\n    \"enabled\": true\n  }\n}", records),
        ("event", "a meeting about $topic with $person and $person2 in $city on $day at $c minutes past nine",
         "{\n  \"event\": \"meeting\",\n  \"topic\": \"$topic\",\n  \"day\": \"$day\",\n  \"time\": \"09:$c\",\n  \"city\": \"$city\",\n  \"guests\": [\"$person\", \"$person2\"]\n}",
         lambda r: {"c": r.randrange(10, 60)}))),
    # -- shell
    shell("grep", "find all files in the folder $nouns that contain the word $noun2", "grep -rl \"$noun2\" $nouns/",
          "The option -r searches the folder $nouns and everything below it, and -l prints only the names of files with the word $noun2."),
    shell("tar", "pack the folder ${adj}_$nouns into an archive", "tar -czf ${adj}_$nouns.tar.gz ${adj}_$nouns/",
          "The options mean: -c creates an archive, -z compresses it and -f gives its name, here ${adj}_$nouns.tar.gz."),
    shell("find", "delete the files ending in .$noun that are older than $n days", "find . -name \"*.$noun\" -mtime +$n -delete",
          "It looks below the current folder for files ending in .$noun that were changed more than $n days ago. Test it without -delete first.", one),
    shell("copy", "copy $nouns.txt to the folder $noun2 on the server $noun3", "scp $nouns.txt $noun3:$noun2/",
          "The command scp copies $nouns.txt over a secure connection. You need an account on $noun3."),
    shell("tail", "show the last $n lines of $noun.log and follow it", "tail -n $n -f $noun.log",
          "The option -n $n prints the last $n lines, and -f waits for new lines in $noun.log. Stop it with Ctrl-C.", one),
    shell("rename", "rename the file $noun.txt to ${adj}_$noun.txt and make it read-only", "mv $noun.txt ${adj}_$noun.txt\nchmod a-w ${adj}_$noun.txt",
          "The first command renames $noun.txt, and the second one removes the right to write to ${adj}_$noun.txt."),
    # -- letters
    *(Task("letter", shape, put(("Write a short email to $person $about. Sign it as $person2.", "Can you draft an email from $person2 to $person $about?", "My name is $person2. Help me write to $person $about.",
                                 "I need a short message to $person $about. It is from $person2.", "Compose a polite letter from $person2 to $person $about.", "Please write $person a note $about. I am $person2."), about=about), text)
      for shape, about, text in (
        ("invite", "inviting them to a $topic evening in $city on $day",
         "Subject: $Topic evening on $day\n\nHi $person,\n\nI am planning a $topic evening in $city on $day and would love to see you there. Please let me know whether you can come.\n\nBest wishes,\n$person2"),
        ("thanks", "to say thank you for the $color $thing",
         "Subject: Thank you for the $thing\n\nDear $person,\n\nThank you so much for the $color $thing. It looks great, and I use the $thing every day. You made me very happy.\n\nKind regards,\n$person2"),
        ("delay", "about the late delivery of the $nouns to $city, needed by $day",
         "Subject: Late delivery of the $nouns\n\nDear $person,\n\nThe $nouns for $city have not arrived yet. Could you please tell me when I can expect them? We need the $nouns by $day.\n\nKind regards,\n$person2"),
        ("apology", "to say sorry for missing the meeting about the $adj $noun and to promise ideas by $day",
         "Subject: Sorry about the meeting\n\nHi $person,\n\nI am sorry that I missed the meeting about the $adj $noun. Could you send me your notes? I will read them and send you my ideas on the $noun by $day.\n\nBest wishes,\n$person2"),
        ("question", "to ask about the price of a $thing and a $thing2 sent to $city",
         "Subject: Price of a $thing and a $thing2\n\nDear $person,\n\nI would like to buy a $thing and a $thing2. Could you tell me what they cost and whether you can send them to $city?\n\nKind regards,\n$person2"),
        ("leave", "asking for a day off on $day to visit a $place in $city",
         "Subject: Day off on $day\n\nDear $person,\n\nI would like to take $day off because I want to visit a $place in $city. All my work will be done before that. Is that fine with you?\n\nBest wishes,\n$person2"))),
    # -- numbered lists
    steps("clean", "clean a $color $thing", "Take the $thing to a bright place and remove the dust with a dry cloth.", "Mix warm water with a little soap.",
          "Wipe the $thing gently with a wet cloth.", "Check that the $color parts did not fade.", "Let the $thing dry before you use it again."),
    steps("cook", "cook a $food with $foods2", "Wash the $foods2 and cut them into small pieces.", "Heat some oil in a pan.", "Add the $foods2 and cook them for ten minutes.",
          "Put in the $food and stir well.", "Season with salt and serve the $food while it is hot."),
    steps("travel", "plan a trip to $city in $month and see a $place and a $place2", "Choose your days in $month and set a budget.", "Book a train or a flight to $city.", "Look for a room close to the center of $city.",
          "Make a list of places, such as a $place and a $place2.", "Pack your bag one day before you leave."),
    steps("pet", "take care of a $animal", "Give the $animal fresh water and good food every day.", "Keep the place where the $animal sleeps clean and dry.",
          "Spend some time with your $animal each day.", "Visit the vet with the $animal once a year.", "Watch for changes, because a sick $animal often eats less."),
    steps("learn", "learn $topic as a $job", "Set a small goal, for example half an hour of $topic a day.", "Find a good book or a course about $topic.", "Practice what you learn, even if it feels slow.",
          "Ask another $job who knows $topic for advice.", "Look back after a month and choose the next goal."),
    steps("repair", "repair a broken $thing", "Find out which part of the $thing is broken.", "Look for a new part in a shop or ask an expert.", "Remove the old part with a screwdriver.",
          "Put in the new part and close the $thing.", "Test the $thing carefully."),
    # -- explanations
    *(Task("glossary", shape, put(("Write a glossary entry for $what.", "Explain the word $what.", "Give a short definition of $what.",
                                   "What is meant by $what?", "Describe $what for a dictionary."), what=what), text)
      for shape, what, text in (
        ("tool", "$thing, a $color tool to $verb a $food",
         "**$Thing** (noun, plural: $things)\n\nA $thing is a $color tool that people use to $verb a $food.\n\nExample: \"Take the $color $thing to $verb the $food.\""),
        ("worker", "$job, a person who $verbs $things in a $place",
         "**$Job** (noun, plural: $jobs)\n\nA $job is a person who $verbs $things. Most $jobs work in a $place.\n\nExample: \"Our $job has $verbed the $thing.\""),
        ("building", "$place, a building where $jobs $verb $nouns",
         "**$Place** (noun)\n\nA $place is a building. It is the place where $jobs $verb $nouns.\n\nExample: \"The $jobs met in the $place to $verb the $nouns.\""),
        ("term", "$noun $noun2, the $adj $noun2 of a $noun",
         "**$Noun $noun2** (term)\n\nThe $noun $noun2 is the $adj $noun2 of a $noun. Every $noun has one.\n\nExample: \"Check the $noun $noun2 before you change the $noun.\""))),
    # -- sums in steps
    *(Task("arithmetic", shape, tuple(ask.replace("@", story) for ask in ("@", "@ Show your steps.", "Solve this problem: @", "@ Explain the answer.", "Help me with this: @", "Question: @")), text, numbers)
      for shape, story, text, numbers in (
        ("gain-loss", "$person has $a $foods, buys $b more and then gives $c to $person2. How many $foods does $person have now?",
         "1. $person starts with $a $foods.\n2. After buying $b more: $a + $b = $ab.\n3. After giving $c to $person2: $ab - $c = $abc.\n\n$person has $abc $foods now.", sums),
        ("boxes", "There are $a boxes with $b $foods in each, and $c $foods lie on the table. How many $foods are there?",
         "1. The boxes hold $a * $b = $ab $foods.\n2. With the $c on the table: $ab + $c = $abc.\n\nThere are $abc $foods.", products),
        ("shopping", "A $thing costs $a dollars and a $thing2 costs $b dollars. $person has a coupon for $c dollars. How much does $person pay for both?",
         "1. Both together cost $a + $b = $ab dollars.\n2. The coupon takes off $c dollars: $ab - $c = $abc.\n\n$person pays $abc dollars for the $thing and the $thing2.", sums),
        ("walk", "A $job walks $a miles a day for $b days and then $c more. How many miles is that?",
         "1. In $b days the $job walks $a * $b = $ab miles.\n2. With $c more: $ab + $c = $abc.\n\nThe $job walks $abc miles in total.", products),
        ("animals", "$person sees $a $animals and $b $animals2 in $city. Later $c of them leave. How many are still there?",
         "1. First there are $a + $b = $ab animals, the $animals and the $animals2.\n2. After $c leave: $ab - $c = $abc.\n\nThere are still $abc animals in $city.", sums))),
    # -- rewriting
    *(Task("rewrite", shape, tuple(f"{ask} {text}" for ask in asks), answer)
      for shape, asks, text, answer in (
        ("past", ("Rewrite this in the past tense:", "Put this text into the past tense:", "Change the verbs to the past:", "Past tense, please:", "Tell this as something that happened yesterday:"),
         "The $job $verbs a $thing near the $place. Then the $job $verbs2 a $color $thing2. $person $verbs3 both.",
         "The $job $verbed a $thing near the $place. Then the $job $verbed2 a $color $thing2. $person $verbed3 both."),
        ("polite", ("Make this sentence more polite:", "Rewrite this politely:", "Say this in a friendly way:", "How can I say this more politely?", "Turn this order into a polite request:"),
         "$person, $verb the $color $thing and $verb2 the $thing2 in the $place.",
         "$person, could you please $verb the $color $thing? It would also be very kind if you could $verb2 the $thing2 in the $place. Thank you!"),
        ("bullets", ("Turn this sentence into bullet points:", "Write this as a bullet list:", "Make a list from this sentence:", "Split this into bullets:", "Rewrite as a list of tasks:"),
         "On $day $person will $verb the $things, $verb2 the $place and $verb3 the $animals in $city.",
         "$person's plan for $day:\n\n- $verb the $things\n- $verb2 the $place\n- $verb3 the $animals in $city"),
        ("swap", ("Replace $person with $person2 in this text:", "Rewrite this text with $person2 instead of $person:", "Change the name $person to $person2:", "Use $person2 in place of $person here:", "The person is called $person2, not $person. Correct this:"),
         "$person lives in $city and works as a $job. Every $day $person $verbs a $thing in the $place.",
         "$person2 lives in $city and works as a $job. Every $day $person2 $verbs a $thing in the $place."))),
    # -- tables
    *(Task("table", shape, put(("Make a markdown table of $what.", "Show $what in a markdown table.", "Create a table with $what.",
                                "Please format this as a markdown table: $what.", "I need a table listing $what."), what=what), text, records)
      for shape, what, text in (
        ("prices", "the prices of a $thing ($a dollars), a $thing2 ($b dollars) and a $thing3 ($c dollars)",
         "| Product | Price |\n| --- | --- |\n| $thing | $a dollars |\n| $thing2 | $b dollars |\n| $thing3 | $c dollars |\n\nThe table lists the $thing, the $thing2 and the $thing3."),
        ("people", "$person from $city ($a), $person2 from $city2 ($b) and $person3 from $city3 ($c) with city and age",
         "| Name | City | Age |\n| --- | --- | --- |\n| $person | $city | $a |\n| $person2 | $city2 | $b |\n| $person3 | $city3 | $c |"),
        ("plan", "a weekly plan: $topic on $day, $topic2 on $day2 and $topic3 on $day3",
         "| Day | Topic |\n| --- | --- |\n| $day | $topic |\n| $day2 | $topic2 |\n| $day3 | $topic3 |\n\nThe week has $topic, $topic2 and $topic3."))),
)
HELD_SHAPES = ("largest_$noun", "question")     # a function and a letter, learned by no one
KINDS = tuple(dict.fromkeys(task.kind for task in TASKS))


@dataclass(frozen=True)
class Draw:
    """One conversation. `held_words` are the held-out words in it; `held` says that its combination is."""
    kind: str
    shape: str
    prompt: str
    answer: str
    names: tuple[str, ...]      # words of the prompt that the answer has to use
    held_words: tuple[str, ...]
    held: bool


def held_words(name: str) -> list[str]:
    return WORDS[name][9::10]


# list name, ending, number: ${nouns2} is ("noun", "s", "2"); the name is the shortest that fits, so an ending is never part of it
SLOT = re.compile(r"\$\{?([A-Za-z]+?)(s|ed)?(\d?)(?![A-Za-z0-9])\}?")


@functools.lru_cache
def slots(text: str) -> list[tuple[str, str]]:
    """The (list, number) pairs that a template asks for, in order; computed slots are not lists and are skipped."""
    found = (m for m in SLOT.finditer(text) if m[1].lower() in WORDS)
    return list(dict.fromkeys((m[1].lower(), m[3]) for m in found))


def invented(rng: random.Random, like: str) -> str:
    """A word of no list, such as "miltoka": it can only be copied, so it teaches copying of words never seen."""
    while True:
        word = "".join(rng.choice("bcdfghklmnprstvwz") + rng.choice("aeiou") + rng.choice(("", "", "l", "n", "r")) for _ in range(rng.choice((2, 2, 3))))
        if word not in LISTED:
            return word.title() if like.istitle() else word


def draw(rng: random.Random, task: Task, rare: float = 0.0, invent: float = 0.0, first: int | None = None) -> Draw:
    """Fill one task; each word is a held-out one with probability `rare` and a made-up one with probability `invent`.

    first: use only so many of each list."""
    fill, words, used = {}, {}, []
    # each slot gets a word of its own, in every form that a template may ask for
    for name, number in slots(" ".join(task.asks) + task.answer):
        rest = [w for w in WORDS[name][:first] if w not in words.values()]
        rare_ones = [w for w in rest if w in held_words(name)]
        pool = rare_ones if rare_ones and rng.random() < rare else [w for w in rest if w not in held_words(name)]
        word = rng.choice(pool)
        if rng.random() < invent:
            word = invented(rng, like=word)
        words[name + number] = word
        used += [word] if pool is rare_ones else []
        for ending in ("", "s", "ed"):
            form = word + ("" if word.endswith(ending) and ending else ending)
            fill[name + ending + number], fill[name.title() + ending + number] = form, form[0].upper() + form[1:]
    fill |= task.numbers(rng)
    key = task.shape + Template(task.asks[0]).substitute(fill)     # one phrasing stands for all: each names every slot
    prompt = Template(rng.choice(task.asks)).substitute(fill)
    answer = Template(rng.choice(OPENINGS.get(task.kind, ("",))) + task.answer).substitute(fill)
    names = tuple(w for w in words.values() if w in prompt and w in answer)
    return Draw(task.kind, task.shape, prompt, answer, names, tuple(used), hashlib.sha256(key.encode()).digest()[0] < 26)


def any_of(kinds_tasks: dict[str, list[Task]], rng: random.Random, wanted: Callable[[Draw], bool], rare: float = 0.0, invent: float = 0.0) -> Draw:
    """Draw until one is wanted. A kind's chance grows with the square root of its number of shapes: functions do not crowd out letters."""
    weights = [len(tasks) ** 0.5 for tasks in kinds_tasks.values()]
    while True:
        tasks, = rng.choices(list(kinds_tasks.values()), weights)
        if wanted(found := draw(rng, rng.choice(tasks), rare, invent)):
            return found


@functools.lru_cache
def by_kind(held_shapes: bool = False) -> dict[str, list[Task]]:
    chosen = [task for task in TASKS if (task.shape in HELD_SHAPES) == held_shapes]
    return {kind: tasks for kind in KINDS if (tasks := [task for task in chosen if task.kind == kind])}


def training_draw(rng: random.Random) -> Draw:
    return any_of(by_kind(), rng, lambda d: not d.held, invent=0.3 if rng.random() < 0.15 else 0.0)


def new_draw(rng: random.Random) -> Draw:
    """Known words and shapes in a combination that training never sees."""
    return any_of(by_kind(), rng, lambda d: d.held)


def rare_draw(rng: random.Random) -> Draw:
    """At least one word that training never sees."""
    return any_of(by_kind(), rng, lambda d: bool(d.held_words), rare=0.5)


def shape_draw(rng: random.Random) -> Draw:
    """A task shape that training never sees."""
    return any_of(by_kind(held_shapes=True), rng, lambda d: True)


def shipped(rng: random.Random, count: int = 640, rare_share: float = 0.15) -> list[Draw]:
    """The prompts of the project: no two alike, none in training; `rare_share` of them with held-out words."""
    found: dict[str, Draw] = {}
    while len(found) < count:
        made = rare_draw(rng) if len(found) < rare_share * count else new_draw(rng)
        found.setdefault(made.prompt, made)
    return rng.sample(list(found.values()), count)


def demo(rng: random.Random, count: int = 1240) -> list[Draw]:
    """Prompts of few shapes and words, the first of each kind but arithmetic: what a drafter can learn in minutes."""
    tasks = [tasks[0] for kind, tasks in by_kind().items() if kind != "arithmetic"]
    found: dict[str, Draw] = {}
    while len(found) < count:
        if (made := draw(rng, rng.choice(tasks), first=20)).held:
            found.setdefault(made.prompt, made)
    return list(found.values())


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--prompts", type=pathlib.Path, help="write the shipped prompts here; without it show one draw of each shape")
    ap.add_argument("--demo", action="store_true", help="with --prompts: the demo's, many of few shapes")
    a = ap.parse_args()
    if a.prompts:
        lines = (json.dumps({"prompt": d.prompt, "kind": d.kind}) for d in (demo if a.demo else shipped)(random.Random(2024)))
        a.prompts.write_text("\n".join(lines) + "\n")
        return
    rng = random.Random(0)
    for task in TASKS:
        made = draw(rng, task)
        print(f"## {made.kind} {made.shape}\n{made.prompt}\n---\n{made.answer}\n")


if __name__ == "__main__":
    main()

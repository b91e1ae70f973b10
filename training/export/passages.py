"""Built-in passages: what an export is proved on where the data set has few texts or is not on the machine.

Prose, code, lists, tables and records, in several languages and scripts, each from its beginning and long enough for
eight positions; there are as many as a proof has prompts.
"""

PASSAGES = (
    "The kettle had been singing for some minutes before anyone noticed that the window was open and that the papers "
    "on the desk, which had lain there since the spring of 1894, were gone.\n\"Who was here?\" she asked.",
    "def mean(values: list[float]) -> float:\n    \"\"\"Return the arithmetic mean.\"\"\"\n    if not values:\n"
    "        raise ValueError(\"no values\")\n    return sum(values) / len(values)\n",
    "Water boils at 100 degrees Celsius at sea level, at 93 in the mountains at 2,000 metres, and at 71 on the summit "
    "of the highest of them. The pressure there is 337 hPa, a third of that on the shore.",
    "1. Open the file.\n2. Read the first 512 bytes.\n3. Compare them with the header; if they differ, stop.\n"
    "4. Otherwise go on with the table of contents, which has 16 bytes an entry.",
    "Das Schiff lief am 3. März aus, bei starkem Wind aus Südwest. Niemand an Bord ahnte, daß die Überfahrt "
    "länger als vierzehn Tage dauern würde.",
    "{\"name\": \"pump\", \"rate\": 0.75, \"limits\": [1, 10, 100], \"active\": true, \"notes\": null}\n",
    "L'été, la rivière est si basse qu'on la traverse à pied; l'hiver, elle emporte les ponts. C'est pourquoi les "
    "maisons du village se tiennent loin du bord.",
    "SELECT name, COUNT(*) AS visits FROM guests WHERE year >= 2019 GROUP BY name ORDER BY visits DESC LIMIT 10;",
    "Dear Sir, your letter of the 12th reached me only yesterday. The parcel has not come, and the carrier knows "
    "nothing of it. I should be glad to hear by return of post what is to be done.",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(\"%d squared is %d\\n\""
    ", i, i * i);\n    }\n    return 0;\n}\n",
    "# Installing\n\nUnpack the archive, then run the script in its folder:\n\n```sh\ntar xf tool.tar.gz\ncd tool\n"
    "./install --prefix ~/tools\n```\n\nIt needs no other package.",
    "Take two eggs, a cup of flour and half a cup of milk. Beat the eggs first; add the flour slowly, so that no lumps "
    "are left, and let it rest for half an hour before the pan is hot.",
    "Question: A train leaves at 9:40 and arrives at 12:05. How long does it take?\nAnswer: Two hours and 25 minutes, "
    "since there are 20 minutes to ten o'clock and 125 minutes after it.",
    "date,station,rain_mm,wind\n2021-03-01,harbour,0.4,SW\n2021-03-02,harbour,12.8,W\n2021-03-03,harbour,,NW\n"
    "2021-03-04,harbour,3.1,N\n",
    "En la plaza del pueblo hay una fuente de piedra que nadie ha visto seca. Los viejos dicen que el agua viene de "
    "la montaña, a más de treinta kilómetros.",
    "<ul class=\"menu\">\n  <li><a href=\"/about\">About us</a></li>\n  <li><a href=\"/prices\">Prices</a></li>\n"
    "</ul>\n<!-- the footer follows -->\n",
    "The bone that is called the femur is the longest of the human body. Its upper end fits into a socket of the "
    "pelvis, its lower end forms the knee together with the tibia and the patella.",
    "import csv\nfrom collections import Counter\n\nwith open(\"names.csv\", newline=\"\") as file:\n    counts = "
    "Counter(row[\"name\"] for row in csv.DictReader(file))\nprint(counts.most_common(3))\n",
    "Всю ночь шёл снег, и к утру дорога исчезла. Почтальон оставил сани у мельницы и дальше пошёл пешком.",
    "\"You cannot mean that,\" said the captain. \"I mean every word,\" the pilot answered, \"and if the wind holds, "
    "we shall all see it before the evening.\"",
    "server:\n  host: localhost\n  port: 8080\n  workers: 4\nlogging:\n  level: info\n  file: server.log\n",
    "Let x be the number of apples and y the number of pears. Then x + y = 17 and 2x + 3y = 41, so y = 41 - 34 = 7 "
    "and x = 10.",
    "Il vecchio orologio della stazione segnava le sei e un quarto da più di vent'anni, e tutti in città lo sapevano, "
    "tranne i forestieri.",
    "On the first of the month the council met in the old hall. Present were the mayor, nine members and the clerk. "
    "The minutes of the last meeting were read and approved.",
    "春になると、川の両岸に桜が咲き、町の人々は橋の上に集まって花を眺める。夜には提灯がともされる。",
    "function total(items) {\n  let sum = 0;\n  for (const item of items) {\n    sum += item.price * item.count;\n  }\n"
    "  return sum.toFixed(2);\n}\n",
    "Copper melts at 1,085 degrees, tin at 232. An alloy of nine parts of the one and one part of the other is harder "
    "than either, and was used for tools long before iron was.",
    "[12:04:31] INFO  started, 3 tasks waiting\n[12:04:33] WARN  task 2: no answer after 2 s, trying again\n"
    "[12:04:35] INFO  task 2: done\n",
    "To whom it may concern: the bearer of this letter has worked in our library for six years, has never lost a book "
    "and has found several that others had lost.",
    "De molen staat op een heuvel ten oosten van het dorp. Als de wind uit zee komt, draaien de wieken dag en nacht en "
    "ruikt het hele dorp naar meel.",
    "Chapter 3. Of the tides\n\nTwice a day the sea rises and falls. The cause is the moon, and in a lesser degree "
    "the sun; where both pull together, the water stands highest.",
    "git clone the repository, make a branch, and change one thing at a time. Before you send it, run the tests; if "
    "one of them fails, say so, and say what you have tried.",
)  # fmt: skip

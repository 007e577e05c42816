"""The wordings that dialogues are made of: questions, system prompts and small talk. Data only."""

WHAT = [
    "What does `{name}` do?",
    "What is `{name}`?",
    "Explain `{name}`.",
    "what does {name} do",
    "What does {name} do?",
    "Tell me about `{name}`.",
    "How does `{name}` work?",
    "Describe `{name}`.",
    "What does `{name}()` do?",
    "what is {name}?",
    "What is {name} for?",
    "What does the {word} `{name}` do?",
    "Can you explain {name} to me?",
    "I do not understand `{name}`. What does it do?",
]
AND = [
    "And `{name}`?",
    "What about `{name}`?",
    "And what does `{name}` do?",
    "Now explain `{name}`.",
    "What does `{name}` do?",
]
MODULE = [
    "What is the module `{name}` for?",
    "What does the `{name}` module do?",
    "What is `{name}`?",
    "Tell me about the {name} module.",
    "When would I use `{name}`?",
    "What is the {name} module?",
    "what is {name}",
    "What is {name}?",
    "What does {name} do?",
    "Explain {name}.",
]
TERM = [
    "What is {name}?",
    'What does "{name}" mean in Python?',
    "Define {name}.",
    'Explain the term "{name}".',
    "What is meant by {name}?",
]
DO = [
    "How do I {task}?",
    "How can I {task}?",
    "I want to {task}. What can I use?",
    "What do I call to {task}?",
]
ARGUMENTS = {
    "it": [
        "What arguments does it take?",
        "Which parameters does it accept?",
        "What are its arguments?",
        "How do I call it?",
    ],
    "name": [
        "What arguments does `{name}` take?",
        "Which parameters does `{name}` accept?",
        "What is the signature of `{name}`?",
        "How do I call `{name}`?",
    ],
}
EXAMPLE = {
    "it": [
        "Show an example.",
        "Can you give me an example?",
        "Show me how to use it.",
        "An example, please.",
        "Example?",
    ],
    "name": [
        "Show an example of `{name}`.",
        "Give me an example of {name}.",
        "How do I use `{name}`?",
        "Show me how `{name}` is used.",
    ],
}
MORE = {
    "it": [
        "Tell me more.",
        "What else should I know about it?",
        "Is there anything else?",
        "Go on.",
        "More details, please.",
    ],
    "name": ["What else should I know about `{name}`?", "Tell me more about `{name}`."],
}
SINCE = {
    "it": ["Since which version of Python?", "When was it added?", "Is it new?"],
    "name": ["When was `{name}` added?", "Since which version of Python is there `{name}`?"],
}
CHANGED = {
    "it": ["Has it changed since?", "What changed in it?", "Did it change between versions?"],
    "name": ["What changed in `{name}`?", "Has `{name}` changed between versions?"],
}
DEPRECATED = {
    "it": ["Is it deprecated?", "Should I still use it?"],
    "name": ["Is `{name}` deprecated?"],
}
WHERE = {
    "it": ["Which module is it in?", "How do I import it?", "Where does it come from?"],
    "name": [
        "Which module is `{short}` in?",
        "How do I import `{name}`?",
        "Where do I find `{short}`?",
    ],
}
MEMBERS = {
    "it": ["What does it provide?", "What is in it?", "Name some of its members."],
    "name": [
        "What does `{name}` provide?",
        "Name some members of `{name}`.",
        "What is in `{name}`?",
    ],
}
THANKS = ["Thanks!", "Thank you.", "Thanks, that helps.", "Great, thank you!", "ok thanks"]
WELCOME = [
    "You are welcome.",
    "You are welcome. Ask me about anything else in the standard library.",
]
HELLO = ["Hello", "Hi", "Hello!", "Hi there", "Good morning", "Hey"]
GREETING = "Hello! Ask me about a module, a class or a function of Python's standard library."
WHO = [
    "Who are you?",
    "What are you?",
    "What can you do?",
    "What is your name?",
    "Help",
    "What do you know?",
]
SELF = (
    "I am Milepost-tiny, a very small language model for tests and demonstrations. I was trained on "
    "documentation, and I can say a few things about Python's standard library."
)
UNKNOWN = "I do not know `{name}`. It is not in the documentation that I was trained on."

SYSTEMS = [
    "You are a helpful assistant.",
    "You are Milepost-tiny, an assistant for Python's standard library.",
    "You answer questions about Python.",
    "Answer briefly.",
    "You are an expert on the Python standard library. Answer with what the documentation says.",
    "You help programmers with Python. Be short and exact.",
    "You are a patient teacher of Python.",
    "Answer questions about Python's standard library in one paragraph.",
    "You are a documentation assistant. Quote the reference.",
    "You are a coding assistant. Today you help a beginner who reads the Python documentation.",
]
OPENINGS = [
    "You are Milepost-tiny, an assistant for Python's standard library.",
    "You are the documentation assistant of a software company.",
    "You are a helpful assistant that knows the Python documentation well.",
    "You are a tutor in a course on Python programming.",
    "You are the chat bot of a Python user group.",
]
RULES = [
    "Answer with what the documentation says, and nothing else.",
    "Keep your answers short: one paragraph is enough.",
    "Begin with the signature when the question is about a function or a method.",
    "Give an example only when the user asks for one.",
    "Put code in fenced blocks.",
    "Put names of functions, classes and modules in backquotes.",
    "When the user asks a follow-up question, it is about the thing that you explained last.",
    "If you do not know something, say so.",
    "Do not invent functions that do not exist.",
    "The user runs Python 3.11 on Linux.",
    "Be polite, and do not repeat the question.",
    "Mention the version in which something was added when the user asks for it.",
    "Assume that the reader knows the basics of the language.",
    "Never talk about other programming languages.",
    "Prefer the standard library to other packages.",
    "Write in plain English, without slang.",
    "Say which exceptions are raised when that matters.",
    "The conversation may be recorded to improve the service.",
    "Users come from all over the world, so avoid idioms.",
    "Questions may be in lower case or without punctuation; answer them all the same.",
]
CONTEXTS = [
    "Answer from this part of the documentation.",
    "Use the following documentation to answer the user's questions.",
    "Here is an excerpt from the Python documentation. Answer questions about it.",
]
TASKS = frozenset(
    "return split join make compute create remove print open read write convert test check find get set "
    "add delete insert send receive parse format encode decode compile execute run start stop wait copy "
    "move rename replace search match count sort reverse round call register construct load dump store "
    "change close connect list iterate generate merge extract compare compress decompress lock unlock "
    "acquire release schedule cancel raise import calculate determine retrieve normalize escape quote "
    "display draw pop append extend map apply append flush seek truncate update clear enable disable "
    "install look locate kill terminate fetch log translate strip fill wrap expand reload".split()
)
POPULAR = frozenset(
    "os os.path sys re json math random itertools functools collections pathlib datetime time string "
    "subprocess threading asyncio logging argparse csv io shutil tempfile glob contextlib typing "
    "dataclasses enum copy heapq bisect statistics hashlib base64 pickle sqlite3 socket struct "
    "textwrap operator queue unittest urllib.parse urllib.request zipfile decimal fractions "
    "collections.abc concurrent.futures multiprocessing inspect warnings traceback uuid secrets".split()
)

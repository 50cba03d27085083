"""Twenty questions of the kinds that the model is used for."""

from engine.chat.template import ChatTemplate
from engine.chat.tokenizer import ChatTokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the sum of a list.",
    "Explain recursion to a child.",
    "List three prime numbers.",
    "Translate 'good morning' to Spanish.",
    "def fibonacci(n):\n    # complete this function",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What does HTTP status 404 mean?",
    "Write a haiku about autumn.",
    "How do I reverse a string in Python?",
    "Name the planets of the solar system.",
    "What is 17 plus 25?",
    "Summarise: The cat sat on the mat. It was warm. It fell asleep.",
    "Fix the bug: for i in range(len(xs)): print(xs[i+1])",
    "Who wrote Hamlet?",
    "Explain what a mutex is.",
    "Write a SQL query that counts users by country.",
    "Tell me a joke about computers.",
    "What is the difference between a list and a tuple?",
)


def chat_ids(template: ChatTemplate, tokenizer: ChatTokenizer, question: str) -> list[int]:
    """A question in chat form, ready for the answer."""
    return tokenizer.encode(template.render([{"role": "user", "content": question}]))

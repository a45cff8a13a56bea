"""Results for people: tables, figures, and the words that go with them."""

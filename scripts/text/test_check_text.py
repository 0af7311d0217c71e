"""Tests of check-text.py: python3 -B -m unittest discover -s scripts/text"""
import importlib.util
import os
import re
import sys
import unittest

FOLDER = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, FOLDER)
import budget
import markdown

spec = importlib.util.spec_from_file_location("check_text", os.path.join(FOLDER, "../check-text.py"))
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)


class Prose(unittest.TestCase):
    def test_comments_and_strings_are_prose_and_code_is_not(self):
        self.assertEqual(check.prose("a.rs", 'let zebra = "a text"; // why'), '"a text" // why')
        self.assertEqual(check.prose("a.rs", "let zebra = 1;"), "")
        self.assertEqual(check.prose("a.cu", "float zebra; // why"), "// why")
        self.assertEqual(check.prose("a.sh", "zebra='a longer text' # why"), "'a longer text' # why")
        self.assertEqual(check.prose("a.py", "    A line of a docstring."), "    A line of a docstring.")
        self.assertEqual(check.prose("a.py", "    zebra(1)"), "")
        self.assertEqual(check.prose("a.md", "All of it."), "All of it.")

    def test_a_forbidden_word_is_named_with_its_line_and_the_usual_english(self):
        rules = [(re.compile(r"\bzebra\b", re.I), "horse")]
        lines = ["let zebra = 1;", "// A Zebra.", "// zebras"]
        self.assertEqual(list(check.forbidden("a.rs", lines, rules)), [(2, "`Zebra`; usual English: horse")])

    def test_a_long_line_counts_if_it_holds_prose(self):
        lines = ["// " + "x" * 120, "x" * 200, "// " + "x" * 119]
        self.assertEqual([number for number, _ in check.long_lines("a.rs", lines)], [1])

    def test_the_longest_function_has_70_lines(self):
        body = "    x = 1\n" * 69
        python = f"def fits():\n{body}\ndef grows():\n{body}    x = 1\n"
        self.assertEqual([what[:5] for _, what in check.long_functions("a.py", python.splitlines())], ["grows"])
        shell = ["fits() {", *[":"] * 68, "}", "grows() {", *[":"] * 69, "}"]
        self.assertEqual([number for number, _ in check.long_functions("a.sh", shell)], [71])


class Markdown(unittest.TestCase):
    def test_paragraphs_end_at_blank_lines_items_tables_headings_and_code(self):
        page = ["# Title", "one", "two", "", "- three", "  four", "- five", "| a | b |", "six"]
        page += ["```", "code", "```", "> seven"]
        found = list(markdown.paragraphs(page))
        self.assertEqual(found, [(2, "one two"), (5, "- three four"), (7, "- five"), (9, "six"), (13, "seven")])

    def test_a_paragraph_has_at_most_90_words(self):
        page = ["word " * 90, "", "word " * 45, "word " * 46]
        self.assertEqual([number for number, _ in check.long_paragraphs(page)], [3])

    def test_anchors_follow_github(self):
        page = ["# `--nnodes MIN:MAX`, and more", "## A [link](x.md)", "## Same", "## Same"]
        page += ["```", "# no", "```", '<a id="own"></a>']
        found = {"--nnodes-minmax-and-more", "a-link", "same", "same-1", "own"}
        self.assertEqual(markdown.anchors(page), found)

    def test_a_link_needs_a_file_and_a_heading(self):
        pages = {"docs/a.md": {"here"}, "README.md": {"top"}}
        names = {*pages, "docs", "docs/x.png"}
        page = ["[a](#here) [b](../README.md#top) [c](x.png) [d](https://x/y) [e](../docs)", "`[f](no.md)`"]
        self.assertEqual(list(markdown.dead_links("docs/a.md", page, pages, names)), [])
        page = ["[a](#gone)", "[b](../README.md#gone)", "[c](gone.md)"]
        self.assertEqual([number for number, _ in markdown.dead_links("docs/a.md", page, pages, names)], [1, 2, 3])

    def test_the_summary_lists_every_page(self):
        pages = ["README.md", "docs/SUMMARY.md", "docs/a.md"]
        self.assertEqual(markdown.unlisted(pages, "docs/SUMMARY.md", ["- [A](a.md)"]), ["README.md"])


class Budget(unittest.TestCase):
    def test_tests_are_distinguished_from_product(self):
        unit_tests = ["#[cfg(test)]", "mod tests {", '    const TEXT: &str = r#"', "text", '"#;', "}"]
        files = {
            "a/Cargo.toml": [],
            "a/src/lib.rs": ["fn f() {}", "", "#[cfg(test)]", "mod double;", *unit_tests],
            "a/src/double.rs": ["fn d() {}"],
            "a/src/double/more.rs": ["fn d() {}"],
            "a/benches/b.rs": ["fn b() {}"],
            "a/src/page.md": ["three words here"],
        }
        counts = budget.sizes(files)
        self.assertEqual(counts["product lines in a"], 1)
        self.assertEqual(counts["test lines in a"], 11)
        self.assertEqual(counts["document words in all"], 3)

    def test_a_package_or_a_top_folder_has_the_budget(self):
        files = dict.fromkeys(["a/Cargo.toml", "a/b/Cargo.toml", "a/b/src/x.rs", "a/x.rs", "c/d/x.sh", "x.py"], ["x"])
        names = {name.partition(" in ")[2] for name in budget.sizes(files)}
        self.assertEqual(names, {"a/b", "all", "a", "c", "the root"})


class Ceilings(unittest.TestCase):
    def test_a_count_over_its_ceiling_or_without_one_fails(self):
        counts = {"dead links": 3, "product lines in new": 1}
        self.assertEqual(check.over({"dead links": 2}, counts), ["dead links", "product lines in new"])
        self.assertEqual(check.over({"dead links": 2}, {"dead links": 2}), [])

    def test_a_ceiling_falls_and_never_rises(self):
        self.assertEqual(check.lowered({"dead links": 5}, {"dead links": 3}), {"dead links": 3})
        self.assertEqual(check.lowered({"dead links": 5}, {"dead links": 7}), {"dead links": 5})
        self.assertEqual(check.lowered({}, {"product lines in new": 7}), {})

    def test_a_budget_is_rounded_up_to_a_hundred(self):
        ceilings = {"product lines in a": 900, "product lines in b": 150, "product lines in gone": 100}
        counts = {"product lines in a": 801, "product lines in b": 101}
        self.assertEqual(check.lowered(ceilings, counts), {"product lines in a": 900, "product lines in b": 150})
        fallen = check.lowered({"product lines in a": 900}, {"product lines in a": 800})
        self.assertEqual(fallen, {"product lines in a": 800})

    def test_budgets_move_with_code_and_their_sum_does_not_rise(self):
        ceilings = {"dead links": 1, "product lines in a": 200, "product lines in all": 200}
        counts = {"dead links": 3, "product lines in a": 90, "product lines in b": 110, "product lines in all": 200}
        budgets = {"product lines in a": 100, "product lines in b": 200, "product lines in all": 200}
        self.assertEqual(check.moved(ceilings, counts), {"dead links": 1} | budgets)
        self.assertEqual(check.moved(ceilings, counts | {"product lines in all": 201}), ceilings)


if __name__ == "__main__":
    unittest.main()

package main

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestTextFromOutsideCannotSteerATerminal(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"plain, with a blank":       "plain, with a blank",
		"中文 é ✓ 👍":                  "中文 é ✓ 👍",
		"\x1b[31mred\x1b[0m":        `\x1b[31mred\x1b[0m`,
		"\x1b]0;title\a":            `\x1b]0;title\a`,
		"\u009b2J":                  `\u009b2J`, // CSI as one character
		"a\nb\r\tc\x00\x7f\b":       `a\nb\r\tc\x00\x7f\b`,
		"\u202egnp.exe\u2066\u200f": `\u202egnp.exe\u2066\u200f`,
		"\u200bzero\u200d\ufeff":    `\u200bzero\u200d\ufeff`,
		"a\u2028b\u00a0c":           `a\u2028b\u00a0c`,
		"\xff\xfe\xc3":              `\xff\xfe\xc3`,
		"\U000e0041":                `\U000e0041`,
	} {
		if got := visible(text); got != want {
			t.Errorf("%q is shown as %q, want %q", text, got, want)
		}
		var out output
		a := &app{stdout: &out}
		if err := a.writeJSON(text); err != nil {
			t.Fatal(err)
		}
		shown := strings.TrimSuffix(out.String(), "\n")
		if got := visible(shown); got != shown {
			t.Errorf("%q as JSON is %q, which is not escaped", text, shown)
		}
		var back string
		if err := json.Unmarshal([]byte(shown), &back); err != nil || back != strings.ToValidUTF8(text, "\ufffd") && !strings.Contains(text, "\xff") {
			t.Errorf("%q as JSON is %s, read back as %q, %v", text, shown, back, err)
		}
	}
}

func TestLinesFitTheTerminalAndLoseNothing(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		"short", "", strings.Repeat("words of several lengths, ", 20), strings.Repeat("x", 300), "a " + strings.Repeat("电话", 60) + " b", strings.Repeat("e\u0301 ", 100), "two  blanks  stay",
	} {
		for _, width := range []int{60, 80, 110} {
			folded := page{width: width}.fold(text, 25)
			lines := strings.Split(folded, "\n")
			for i, line := range lines {
				if i == 0 {
					line = strings.Repeat(" ", 25) + line
				}
				if !strings.HasPrefix(line, strings.Repeat(" ", 25)) || columns(line) >= width {
					t.Errorf("width %d: %q is a line of %q", width, line, text)
				}
			}
			squeeze := func(s string) string { return strings.ReplaceAll(strings.ReplaceAll(s, " ", ""), "\n", "") }
			if squeeze(folded) != squeeze(text) {
				t.Errorf("width %d: %q became %q", width, text, folded)
			}
		}
		if got := (page{}).fold(text, 25); got != text {
			t.Errorf("without a terminal %q became %q", text, got)
		}
		for _, n := range []int{1, 5, 20} {
			short := cut(text, n)
			if columns(short) > n || columns(text) <= n && short != text || columns(text) > n && !strings.HasSuffix(short, "…") {
				t.Errorf("%q cut to %d columns is %q", text, n, short)
			}
		}
	}
	if got := columns("a电e\u0301"); got != 4 {
		t.Errorf("%d columns, want 4", got)
	}
}

package trial

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

var someProgress = Progress{
	Elapsed: 75 * time.Second, Orders: 400, Placed: 374, Refused: 26, Doing: "waiting until every order is final",
	Counts: Counts{Unpaid: 11, Paid: 187, ByTimeout: 158, ByHand: 18, Mean: 126 * time.Millisecond, Max: 3504 * time.Millisecond},
}

var escapes = regexp.MustCompile("\x1b\\[[0-9;]*[A-Za-z]")

func TestElsewhereProgressIsALineNowAndThen(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	d := NewDisplay(&b, func(string) string { return "xterm" }, time.Hour)
	d.Show(someProgress)
	d.Show(someProgress) // too soon
	d.Say("something happens")
	d.Done()
	want := "01:15  placed 374/400 (26 refused), pending 11, paid 187, cancelled 176 (158 by timeout, late by 126 ms on average, 3504 ms at most)\nsomething happens\n"
	if b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}

func TestAFrameFitsTheTerminal(t *testing.T) {
	t.Parallel()
	for width := 1; width < 200; width++ {
		for _, color := range []bool{false, true} {
			lines := frame(someProgress, Style{Width: width, Color: color})
			for _, line := range lines {
				plain := escapes.ReplaceAllString(line, "")
				if n := utf8.RuneCountInString(plain); n >= width && n > 0 {
					t.Fatalf("%d columns in a terminal of %d: %q", n, width, plain)
				}
				if !color && plain != line {
					t.Fatalf("escapes without colour: %q", line)
				}
			}
			if width >= 80 {
				text := escapes.ReplaceAllString(strings.Join(lines, "\n"), "")
				for _, part := range []string{"01:15", "waiting until every order is final", "374", "26 refused", "11", "187", "176", "18 by hand", "126 ms", "3504 ms"} {
					if !strings.Contains(text, part) {
						t.Fatalf("width %d: no %q in\n%s", width, part, text)
					}
				}
			}
		}
	}
}

// A drawing replaces the one before, and a line that stays takes its place.
func TestDrawingsReplaceEachOther(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	d := &Display{w: &b, style: Style{Width: 80}}
	d.draw(someProgress)
	first := b.String()
	if strings.HasPrefix(first, "\x1b[") {
		t.Errorf("the first drawing goes up: %q", first)
	}
	lines := strings.Count(first, "\n")
	b.Reset()
	d.draw(someProgress)
	if up := "\x1b[6A\r"; lines != 6 || !strings.HasPrefix(b.String(), up) {
		t.Errorf("%d lines, and the second drawing begins with %q, want %q", lines, b.String()[:10], up)
	}
	b.Reset()
	d.Say("stays")
	if want := "\x1b[6A\r\x1b[Jstays\n"; b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
	b.Reset()
	d.Done()
	if b.Len() != 0 {
		t.Errorf("nothing was drawn, and %q is written", b.String())
	}
}

func TestNothingButATerminalIsDrawnOn(t *testing.T) {
	t.Parallel()
	getenv := func(key string) string { return map[string]string{"TERM": "xterm"}[key] }
	if s := StyleOf(&bytes.Buffer{}, getenv); s != (Style{Width: 80}) {
		t.Errorf("%+v", s)
	}
	file, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close() //nolint:errcheck // nothing was written
	if d := NewDisplay(file, getenv, 0); d.terminal != nil {
		t.Error("a file that is no terminal is taken for one")
	}
}

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/text/width"

	"github.com/lapse-orders/lapse/internal/trial"
)

// visible writes a text that came from outside so that it cannot steer the terminal: control characters, escape sequences, marks that turn the
// direction of the text, and what is not UTF-8 are written as Go would write them in a string (\x1b, \u202e). Line breaks are too.
func visible(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); {
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			quoted := strconv.QuoteRuneToASCII(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		i += size
	}
	return b.String()
}

// writeJSON prints a value for other programs, or for a person at a terminal: what could steer that is escaped, as JSON allows for every
// character of a string.
func (a *app) writeJSON(v any) error {
	var plain bytes.Buffer
	enc := json.NewEncoder(&plain)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("print as JSON: %w", err)
	}
	var b strings.Builder
	for _, r := range plain.String() {
		switch {
		case r == '\n' || unicode.IsPrint(r):
			b.WriteRune(r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	if _, err := io.WriteString(a.stdout, b.String()); err != nil {
		return fmt.Errorf("print as JSON: %w", err)
	}
	return nil
}

// columns is how many columns of a terminal a visible text takes.
func columns(s string) int {
	n := 0
	for _, r := range s {
		n += columnsOf(r)
	}
	return n
}

func columnsOf(r rune) int {
	switch kind := width.LookupRune(r).Kind(); {
	case unicode.In(r, unicode.Mn, unicode.Me):
		return 0
	case kind == width.EastAsianWide || kind == width.EastAsianFullwidth:
		return 2
	}
	return 1
}

// pad fills a visible text up to n columns.
func pad(s string, n int) string { return s + strings.Repeat(" ", max(n-columns(s), 0)) }

// cut shortens a visible text to n columns, with a mark where something is missing.
func cut(s string, n int) string {
	if columns(s) <= n {
		return s
	}
	used := 0
	for i, r := range s {
		if used += columnsOf(r); used > n-1 {
			return s[:i] + "…"
		}
	}
	return s
}

// page is where a command prints for people.
type page struct {
	// width of the lines in columns; 0: no terminal, lines are as long as they are, for other programs to search.
	width int
	color bool
}

func (a *app) page() page {
	if !isTerminal(a.stdout) {
		return page{}
	}
	style := trial.StyleOf(a.stdout, a.getenv)
	return page{width: max(style.Width, 60), color: style.Color}
}

// strong makes a text stand out, where it can.
func (p page) strong(s string) string {
	if !p.color {
		return s
	}
	return "\x1b[1m" + s + "\x1b[0m"
}

// fold breaks a visible text into lines for a terminal, all but the first indented by as many columns as stand before it.
func (p page) fold(s string, indent int) string {
	room := p.width - 1 - indent
	if p.width == 0 || room < 20 {
		return s
	}
	var lines []string
	line, used := "", 0
	flush := func() {
		lines = append(lines, line)
		line, used = "", 0
	}
	for _, word := range strings.Split(s, " ") {
		for columns(word) > room { // one that no line can hold is broken
			if line != "" {
				flush()
			}
			head := 0
			for i, r := range word {
				if used+columnsOf(r) > room {
					head = i
					break
				}
				used += columnsOf(r)
			}
			line = word[:head]
			word = word[head:]
			flush()
		}
		n := columns(word)
		if line != "" && used+1+n > room {
			flush()
		}
		if line != "" {
			line, used = line+" ", used+1
		}
		line, used = line+word, used+n
	}
	flush()
	return strings.Join(lines, "\n"+strings.Repeat(" ", indent))
}

package trial

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// Progress is what a display shows.
type Progress struct {
	Elapsed         time.Duration
	Orders          int // asked for in all
	Placed, Refused int
	Counts
	// Doing says in a few words what the run waits for.
	Doing string
}

// Display shows progress: in place on a terminal, as a line now and then elsewhere. It is not safe for concurrent use.
type Display struct {
	w        io.Writer
	terminal *os.File // nil: none
	style    Style
	interval time.Duration // between two lines where it is no terminal
	last     time.Time
	drawn    int // lines on the terminal that the next drawing replaces
}

// NewDisplay makes a display on w. It draws in place if w is a terminal that can (TERM is not dumb), without colours where NO_COLOR is
// set to anything.
func NewDisplay(w io.Writer, getenv func(string) string, interval time.Duration) *Display {
	d := &Display{w: w, interval: interval}
	d.style, d.terminal = styleOf(w, getenv)
	return d
}

// StyleOf says how to print on w: with its width and, unless NO_COLOR is set, with colours where it is a terminal, else for 80 columns.
func StyleOf(w io.Writer, getenv func(string) string) Style {
	style, _ := styleOf(w, getenv)
	return style
}

func styleOf(w io.Writer, getenv func(string) string) (Style, *os.File) {
	file, isFile := w.(*os.File)
	if !isFile || getenv("TERM") == "dumb" || getenv("TERM") == "" {
		return Style{Width: 80}, nil
	}
	width := terminalWidth(file)
	if width == 0 {
		return Style{Width: 80}, nil
	}
	return Style{Width: width, Color: getenv("NO_COLOR") == ""}, file
}

// Say prints a line that stays.
func (d *Display) Say(format string, args ...any) {
	d.erase()
	d.print(fmt.Sprintf(format, args...) + "\n")
}

// Show shows the present state.
func (d *Display) Show(p Progress) {
	if d.terminal != nil {
		d.draw(p)
		return
	}
	if time.Since(d.last) < d.interval {
		return
	}
	d.last = time.Now()
	d.print(plain(p) + "\n")
}

// plain is the progress in one line.
func plain(p Progress) string {
	line := fmt.Sprintf("%s  placed %d/%d", clock(p.Elapsed), p.Placed, p.Orders)
	if p.Refused > 0 {
		line += fmt.Sprintf(" (%d refused)", p.Refused)
	}
	line += fmt.Sprintf(", pending %d, paid %d, cancelled %d", p.Unpaid, p.Paid, p.ByTimeout+p.ByHand)
	if p.ByTimeout > 0 {
		line += fmt.Sprintf(" (%d by timeout, late by %d ms on average, %d ms at most)", p.ByTimeout, p.Mean.Milliseconds(), p.Max.Milliseconds())
	}
	return line
}

// Done takes the progress off the terminal.
func (d *Display) Done() { d.erase() }

// print writes; a terminal that is gone is no reason to end a run.
func (d *Display) print(text string) { _, _ = io.WriteString(d.w, text) }

func (d *Display) erase() {
	if d.drawn > 0 {
		d.print(fmt.Sprintf("\x1b[%dA\r\x1b[J", d.drawn))
		d.drawn = 0
	}
}

func (d *Display) draw(p Progress) {
	// The width is asked each time: a window may be made narrower.
	if width := terminalWidth(d.terminal); width > 0 {
		d.style.Width = width
	}
	lines := frame(p, d.style)
	var b strings.Builder
	if d.drawn > 0 {
		fmt.Fprintf(&b, "\x1b[%dA\r", d.drawn)
	}
	for _, line := range lines {
		b.WriteString(line + "\x1b[K\n")
	}
	d.print(b.String() + "\x1b[J")
	d.drawn = len(lines)
}

// frame is one picture of the progress. No line is wider than the terminal: one that wraps would make the next drawing start too low.
func frame(p Progress, s Style) []string {
	total := max(p.Orders, 1)
	bar := max(min(s.Width-34, 50), 0)
	line := func(name string, n int64, color, note string) string {
		cells := min(int(n)*bar/total, bar)
		if n > 0 && cells == 0 && bar > 0 {
			cells = 1
		}
		left := fit(fmt.Sprintf("%-10s%6d  ", name, n), s.Width-1)
		rest := s.Width - 1 - len(left) - bar
		text := s.paint(bold, left) + s.paint(color, strings.Repeat("█", cells)) + s.paint(faint, strings.Repeat("░", bar-cells))
		if rest > 2 {
			text += s.paint(faint, fit("  "+note, rest))
		}
		return text
	}
	percent := func(n int64) string { return fmt.Sprintf("%3d %%", int(n)*100/total) }
	refused := percent(int64(p.Placed))
	if p.Refused > 0 {
		refused = fmt.Sprintf("%d refused", p.Refused)
	}
	late := "lateness  no cancel yet"
	if p.ByTimeout > 0 {
		late = fmt.Sprintf("lateness  mean %d ms, max %d ms, of %d by timeout", p.Mean.Milliseconds(), p.Max.Milliseconds(), p.ByTimeout)
	}
	return []string{
		fit(fmt.Sprintf("%s  %s", clock(p.Elapsed), p.Doing), s.Width-1),
		line("placed", int64(p.Placed), bold, refused),
		line("pending", p.Unpaid, faint, percent(p.Unpaid)),
		line("paid", p.Paid, green, percent(p.Paid)),
		line("cancelled", p.ByTimeout+p.ByHand, red, fmt.Sprintf("%d by hand", p.ByHand)),
		fit(late, s.Width-1),
	}
}

// fit cuts a text of plain characters to a width.
func fit(text string, width int) string { return text[:max(min(len(text), width), 0)] }

func clock(d time.Duration) string {
	return fmt.Sprintf("%02d:%02d", int(d.Minutes()), int(d.Seconds())%60)
}

package trial

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// Report is the result of a run. It is printed as a table by [Report.Print], and as JSON as it is.
type Report struct {
	Run       string    `json:"run"`
	StartedAt time.Time `json:"started_at"`
	Took      float64   `json:"took_seconds"`
	Orders    int       `json:"orders"`
	Rate      float64   `json:"rate"`
	Timeout   string    `json:"timeout"`
	Seed      uint64    `json:"seed"`
	// Kinds says what happened, by kind of customer, and Total over all of them.
	Kinds []KindLine `json:"kinds"`
	Total KindLine   `json:"total"`
	// Lateness is that of the orders cancelled by timeout, but for those that reconcile cancelled.
	Lateness Lateness `json:"lateness"`
	// Kills are the processes that were killed with SIGKILL and started again.
	Kills []Kill `json:"kills"`
	// Losses says what was lost on purpose; nil where nothing was to be.
	Losses *Losses `json:"losses,omitempty"`
	// Reconcile is the run of reconcile at the end; nil without a replica.
	Reconcile *Reconciled `json:"reconcile,omitempty"`
	// MoneyBack is what lapse refund gave back; nil where it was left out, since the database has payments of another gateway.
	MoneyBack *MoneyBack `json:"money_back,omitempty"`
	// Checks are the invariants, each with the rows that were looked at: those of the tables in the middle of a run and at its end, those
	// of the ledger (I7) at its end.
	Checks []orders.Check `json:"checks"`
	// Holds: no check found a violation.
	Holds bool `json:"holds"`
}

// KindLine counts what became of the orders of one kind of customer.
type KindLine struct {
	Kind    Kind `json:"kind,omitempty"`
	Orders  int  `json:"orders"`  // asked for
	Refused int  `json:"refused"` // out of stock, nothing written
	Paid    int  `json:"paid"`
	Timeout int  `json:"cancelled_by_timeout"`
	Hand    int  `json:"cancelled_by_hand"`
	Unpaid  int  `json:"unpaid"` // not final when the run ended
	Refunds int  `json:"refunds"`
	// Refunded is the sum of the refunds in minor units.
	Refunded int64 `json:"refunded,string"`
}

func (k *KindLine) add(o KindLine) {
	k.Orders += o.Orders
	k.Refused += o.Refused
	k.Paid += o.Paid
	k.Timeout += o.Timeout
	k.Hand += o.Hand
	k.Unpaid += o.Unpaid
	k.Refunds += o.Refunds
	k.Refunded += o.Refunded
}

// Lateness sums up cancelled_at - deadline_at as stored, in milliseconds. The percentiles are values that occurred (nearest rank).
type Lateness struct {
	Orders int   `json:"orders"`
	P50    int64 `json:"p50_ms"`
	P99    int64 `json:"p99_ms"`
	Max    int64 `json:"max_ms"`
	// Long is how many were later than a second.
	Long int `json:"over_1s"`
}

// Kill is one process that was killed and came back.
type Kill struct {
	Process string `json:"process"`
	// After is when it was killed, since the run's start; Back is how long it took until its successor was ready.
	After float64 `json:"after_seconds"`
	Back  float64 `json:"ready_again_seconds"`
	// Long is how many orders were later than a second that fell due within 2 s of the kill: what it had in hand comes back after the
	// invisible time, what the broker was about to give it after 3 s.
	Long int `json:"over_1s"`

	at time.Time // by the database's clock
}

// long is the lateness that a report counts: ten ticks of the broker.
const long = time.Second

// aroundKill is how far from a kill a deadline is put down to it.
const aroundKill = 2 * time.Second

// tally sums up the ledger and the database by kind.
func tally(accounts []Account, rows map[int64]Row) (kinds []KindLine, total KindLine) {
	byKind := map[Kind]*KindLine{}
	for _, k := range Kinds() {
		byKind[k] = &KindLine{Kind: k}
	}
	for _, a := range accounts {
		line := KindLine{Orders: 1}
		row, found := rows[a.ID]
		switch {
		case !found && a.Refused != "":
			line.Refused = 1
		case !found:
		case row.Status == orders.Paid:
			line.Paid = 1
		case row.byTimeout():
			line.Timeout = 1
		case row.Status == orders.Cancelled:
			line.Hand = 1
		default:
			line.Unpaid = 1
		}
		for _, p := range row.Payments {
			if p.Refund > 0 {
				line.Refunds++
				line.Refunded += p.Refund
			}
		}
		byKind[a.Kind].add(line)
		total.add(line)
	}
	for _, k := range Kinds() {
		kinds = append(kinds, *byKind[k])
	}
	return kinds, total
}

// lateness sums up the orders that were cancelled by a message at their deadline.
func lateness(rows map[int64]Row) Lateness {
	var late []time.Duration
	for _, r := range rows {
		if r.byMessage() {
			late = append(late, r.late())
		}
	}
	slices.Sort(late)
	l := Lateness{
		Orders: len(late), P50: percentile(late, 50).Milliseconds(), P99: percentile(late, 99).Milliseconds(), Max: percentile(late, 100).Milliseconds(),
	}
	for _, d := range late {
		if d > long {
			l.Long++
		}
	}
	return l
}

// countLong fills in how many orders each kill made late.
func countLong(kills []Kill, rows map[int64]Row) {
	for i := range kills {
		k := &kills[i]
		for _, r := range rows {
			if r.byMessage() && r.late() > long && r.DeadlineAt.Sub(k.at).Abs() <= aroundKill {
				k.Long++
			}
		}
	}
}

// percentile gives the smallest value of a sorted list that at least p per cent of the list do not exceed (nearest rank); 0 of an empty
// list.
func percentile[T cmp.Ordered](sorted []T, p int) T {
	if len(sorted) == 0 {
		var zero T
		return zero
	}
	return sorted[max((len(sorted)*p+99)/100, 1)-1]
}

// Broken counts the violations over all checks.
func (r Report) Broken() int64 {
	var n int64
	for _, c := range r.Checks {
		n += c.Violations
	}
	return n
}

// Style says how something is printed: Width in columns (at least 60 are assumed), and whether colours may be used.
type Style struct {
	Width int
	Color bool
}

// ANSI colours, which every terminal with colours has.
const (
	green = "32"
	red   = "31"
	faint = "2"
	bold  = "1"
)

func (s Style) paint(code, text string) string {
	if !s.Color {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// Print writes the report for a person.
func (r Report) Print(w io.Writer, s Style) error {
	s.Width = min(max(s.Width, 60), 132) // longer lines are hard to read
	var b strings.Builder
	r.printKinds(&b, s)
	fmt.Fprintln(&b)
	r.printLateness(&b, s)
	r.printReconcile(&b, s)
	r.printMoneyBack(&b, s)
	fmt.Fprintln(&b)
	for _, c := range r.Checks {
		printCheck(&b, s, c)
	}
	fmt.Fprintln(&b)
	if n := r.Broken(); n > 0 {
		fmt.Fprintf(&b, "%s after %.0f s\n", s.paint(red, fmt.Sprintf("the invariants do not hold (%d %s),", n, plural(n, "violation"))), r.Took)
	} else {
		fmt.Fprintf(&b, "%s after %.0f s\n", s.paint(green, "every invariant holds,"), r.Took)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (r Report) printKinds(b *strings.Builder, s Style) {
	columns := []string{"orders", "refused", "paid", "timeout", "by hand", "refunds"}
	header := fmt.Sprintf("%-21s", "customers who")
	for _, c := range columns {
		header += fmt.Sprintf("%8s", c)
	}
	fmt.Fprintln(b, s.paint(bold, header+fmt.Sprintf("%11s", currency+" back")))
	line := func(name string, k KindLine) {
		fmt.Fprintf(b, "%-21s%s%s%s%s%s%s%11s\n", name, number(k.Orders), number(k.Refused), number(k.Paid), number(k.Timeout), number(k.Hand), number(k.Refunds), money(k.Refunded))
	}
	for _, k := range r.Kinds {
		line(k.Kind.Says(), k)
	}
	line("all", r.Total)
	if r.Total.Unpaid > 0 {
		n := int64(r.Total.Unpaid)
		fmt.Fprintln(b, s.paint(red, fmt.Sprintf("still unpaid: %d %s", n, plural(n, "order"))))
	}
}

// number leaves a zero out: what happened stands out.
func number(n int) string {
	if n == 0 {
		return "       -"
	}
	return fmt.Sprintf("%8d", n)
}

func money(minor int64) string {
	if minor == 0 {
		return "-"
	}
	return fmt.Sprintf("%d.%02d", minor/100, minor%100)
}

func (r Report) printLateness(b *strings.Builder, s Style) {
	fmt.Fprintf(b, "%s of %d cancels by timeout: p50 %s, p99 %s, max %s\n", s.paint(bold, "lateness"), r.Lateness.Orders, millis(r.Lateness.P50), millis(r.Lateness.P99), millis(r.Lateness.Max))
	killed := 0
	for _, k := range r.Kills {
		fmt.Fprintf(b, "%s was killed after %.1f s, its successor was ready in %.1f s\n", k.Process, k.After, k.Back)
		killed += k.Long
	}
	if r.Lateness.Long > 0 {
		fmt.Fprintf(b, "later than 1 s: %d, of which %d fell due within 2 s of a kill\n", r.Lateness.Long, killed)
	}
}

func millis(ms int64) string {
	if ms < 10_000 {
		return fmt.Sprintf("%d ms", ms)
	}
	return fmt.Sprintf("%.1f s", float64(ms)/1000)
}

func plural(n int64, word string) string {
	if n == 1 {
		return word
	}
	return word + "s"
}

// checkIndent is the width of tick, invariant and rows, before what a check says.
const checkIndent = 18

func printCheck(b *strings.Builder, s Style, c orders.Check) {
	tick := s.paint(green, "✓")
	if c.Violations > 0 {
		tick = s.paint(red, "✗")
	}
	says := wrap(c.Says, s.Width-checkIndent)
	fmt.Fprintf(b, "%s %-2s %6d rows  %s\n", tick, c.Invariant, c.Rows, says[0])
	for _, more := range says[1:] {
		fmt.Fprintf(b, "%*s%s\n", checkIndent, "", more)
	}
	if c.Violations == 0 {
		return
	}
	fmt.Fprintln(b, s.paint(red, fmt.Sprintf("%*s%s: %d %s", checkIndent, "", c.Name, c.Violations, plural(c.Violations, "violation"))))
	const shown = 10
	for _, v := range c.Examples[:min(len(c.Examples), shown)] {
		of := "order " + orders.FormatID(v.OrderID)
		if v.OrderID == 0 {
			of = "SKU " + v.SKU
		}
		lines := wrap(of+": "+v.Detail, s.Width-checkIndent-2)
		fmt.Fprintf(b, "%*s%s\n", checkIndent, "", lines[0])
		for _, more := range lines[1:] {
			fmt.Fprintf(b, "%*s  %s\n", checkIndent, "", more)
		}
	}
	if rest := c.Violations - shown; rest > 0 {
		fmt.Fprintf(b, "%*sand %d more; --json lists up to %d\n", checkIndent, "", rest, maxExamples)
	}
}

// wrap breaks a text at blanks into lines of at most width characters; a longer word has a line of its own. It gives at least one line.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case len(line)+1+len(word) <= width:
			line += " " + word
		default:
			lines = append(lines, line)
			line = word
		}
	}
	return append(lines, line)
}

package trial

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/lapse-orders/lapse/orders"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestPercentilesAreValuesThatOccurred(t *testing.T) {
	t.Parallel()
	hundred := make([]int, 100)
	for i := range hundred {
		hundred[i] = i + 1
	}
	for _, test := range []struct {
		name          string
		of            []int
		p50, p99, max int
	}{
		{"none", nil, 0, 0, 0},
		{"one", []int{7}, 7, 7, 7},
		{"two", []int{1, 9}, 1, 9, 9},
		{"three", []int{1, 5, 9}, 5, 9, 9},
		{"a hundred", hundred, 50, 99, 100},
		{"a hundred and one", append(slices.Clone(hundred), 1000), 51, 100, 1000},
	} {
		if p50, p99, worst := percentile(test.of, 50), percentile(test.of, 99), percentile(test.of, 100); p50 != test.p50 || p99 != test.p99 || worst != test.max {
			t.Errorf("%s: p50 %d, p99 %d, max %d, want %d, %d, %d", test.name, p50, p99, worst, test.p50, test.p99, test.max)
		}
	}
}

func TestLatenessIsThatOfTimeoutsAlone(t *testing.T) {
	t.Parallel()
	rows := map[int64]Row{
		1: {Status: orders.Cancelled, Reason: orders.ReasonTimeout, DeadlineAt: noon, CancelledAt: noon.Add(120 * time.Millisecond)},
		2: {Status: orders.Cancelled, Reason: handReason, DeadlineAt: noon, CancelledAt: noon.Add(-time.Second)},
		3: {Status: orders.Paid, DeadlineAt: noon},
		4: {Status: orders.Cancelled, Reason: orders.ReasonTimeout, DeadlineAt: noon, CancelledAt: noon.Add(4 * time.Second)},
	}
	if got, want := lateness(rows), (Lateness{Orders: 2, P50: 120, P99: 4000, Max: 4000, Long: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	kills := []Kill{{at: noon.Add(time.Second)}, {at: noon.Add(time.Minute)}}
	if countLong(kills, rows); kills[0].Long != 1 || kills[1].Long != 0 {
		t.Errorf("%+v, want the late one put down to the first kill", kills)
	}
}

func TestTheTallyCountsEachOrderOnce(t *testing.T) {
	t.Parallel()
	accounts, rows := agreeing()
	kinds, total := tally((&Ledger{accounts: accounts}).Accounts(), rows)
	if want := (KindLine{Orders: 8, Refused: 1, Paid: 2, Timeout: 3, Hand: 1, Unpaid: 1, Refunds: 2, Refunded: 130}); total != want {
		t.Errorf("total %+v, want %+v", total, want)
	}
	var sum KindLine
	for _, k := range kinds {
		sum.add(k)
	}
	if sum != total {
		t.Errorf("the lines sum up to %+v, the total is %+v", sum, total)
	}
	if got, want := kinds[slices.Index(Kinds(), CancelsByHand)], (KindLine{Kind: CancelsByHand, Orders: 2, Timeout: 1, Hand: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// example is a report with everything in it.
func example(broken bool) Report {
	accounts, rows := agreeing()
	r := Report{
		Run: "demo-0", StartedAt: noon, Took: 41.2, Orders: 8, Rate: 20, Timeout: "10s", Seed: 1, Holds: !broken,
		Lateness: Lateness{Orders: 3, P50: 95, P99: 498, Max: 13504, Long: 1}, Kills: []Kill{{Process: "consumer 1", After: 18, Back: 1.1, Long: 1}},
		Checks: []orders.Check{
			{Invariant: "I1", Name: "paid_is_not_cancelled", Says: "no cancelled order has an accepted payment", Rows: 185},
			{Invariant: "I2", Name: "each_move_once", Rows: 733,
				Says: "an order's ledger has reserve for every item, then sell if it is paid and release if it is cancelled, of the same quantity, and nothing else"},
		},
	}
	r.Kinds, r.Total = tally((&Ledger{accounts: accounts}).Accounts(), rows)
	if broken {
		r.Checks[1].Violations = 12
		for i := range int64(12) {
			r.Checks[1].Examples = append(r.Checks[1].Examples, orders.Violation{OrderID: 1795000000000000000 + i, Detail: "cancelled: item 2, reserve 2, release 0, sell 0"})
		}
		r.Checks[1].Examples[1] = orders.Violation{SKU: "broken", Detail: "reserved is 5, unpaid orders hold 0"}
	}
	return r
}

// exampleLost is a report of a run that lost messages on purpose.
func exampleLost() Report {
	lost, before, reconciled := lostWorld()
	for id := int64(1795000000000000000); len(reconciled.Orders) < 12; id++ {
		reconciled.Orders = append(reconciled.Orders, ReconciledOrder{ID: id, Missed: orders.MissedNotReceived, Because: "no consumer has handled it"})
		lost.Orders[id], before[id] = true, Row{Status: orders.Unpaid}
	}
	r := example(false)
	r.MoneyBack = &MoneyBack{Refunds: 89, Amount: 669382, Calls: 90}
	r.Losses, r.Reconcile = losses(5, lost, before), reconciled
	r.Checks = inOrder(r.Checks, []orders.Check{compareReconciled(lost, before, reconciled)})
	return r
}

func TestTheReportIsPrintedLikeThis(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		report Report
		style  Style
	}{
		"holds-80":   {example(false), Style{Width: 80}},
		"broken-80":  {example(true), Style{Width: 80}},
		"broken-120": {example(true), Style{Width: 120, Color: true}},
		"lost-80":    {exampleLost(), Style{Width: 80}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var b strings.Builder
			if err := test.report.Print(&b, test.style); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if b.String() != string(want) {
				t.Errorf("printed:\n%s\nwant:\n%s", b.String(), want)
			}
			if hasColor := strings.Contains(b.String(), "\x1b["); hasColor != test.style.Color {
				t.Errorf("colours: %t, want %t", hasColor, test.style.Color)
			}
		})
	}
}

func TestNoLineOfAReportIsWiderThanTheTerminal(t *testing.T) {
	t.Parallel()
	// Words of one letter fill every line to its end.
	report := example(true)
	report.Checks[1].Says, report.Checks[1].Examples[0].Detail = strings.Repeat("a ", 200), strings.Repeat("b ", 200)
	for _, width := range []int{80, 81, 100, 120, 300} {
		var b strings.Builder
		if err := report.Print(&b, Style{Width: width}); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(b.String()) {
			if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > width {
				t.Errorf("%d columns at a width of %d: %s", n, width, line)
			}
		}
	}
}

func TestTheReportSurvivesJSON(t *testing.T) {
	t.Parallel()
	want := exampleLost()
	text, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var got Report
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	again, err := json.Marshal(got)
	if err != nil || string(again) != string(text) {
		t.Errorf("%v\n%s\n%s", err, text, again)
	}
	for _, key := range []string{`"cancelled_by_timeout":`, `"p99_ms":498`, `"order_id":"1795000000000000000"`, `"holds":true`, `"refunded":"130"`,
		`"unpaid_past_their_deadlines":12`, `"missed":"sent_not_received"`} {
		if !strings.Contains(string(text), key) {
			t.Errorf("no %s in %s", key, text)
		}
	}
}

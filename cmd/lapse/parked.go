package main

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/go-sql-driver/mysql"
	"github.com/spf13/cobra"

	"github.com/lapse-orders/lapse/internal/ops/why"
	"github.com/lapse-orders/lapse/orders"
)

const (
	// listed is how many lines lapse parked list prints unless told otherwise: what a person reads.
	listed = 50
	// pageSize is how many are read at once of what may be many.
	pageSize = 100
	// dumped is how much of a body that is no text is printed.
	dumped = 1 << 10
)

func (a *app) parkedCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "parked COMMAND",
		Short: "List what was set aside for a person, give it back, or discard it",
		Long: `Orders, timed messages and payments that cannot be handled are parked with their reason: an order that could not be
cancelled, a message that the broker refuses or gave up, one that cannot be read, a payment notice that contradicts
an earlier one, a refund that was given up. Nothing parked is lost, and nothing parked is done until somebody looks;
an unpaid order among them is still cancelled by reconcile, when it is overdue.`,
		Example: `  lapse parked list
  lapse parked show 12
  lapse parked retry 12 13
  lapse parked discard 14 --reason 'a trial message of the new shop'`,
		Args: cobra.ArbitraryArgs,
		RunE: a.group,
	}
	cmd.AddCommand(a.parkedListCmd(), a.parkedShowCmd(), a.parkedRetryCmd(), a.parkedDiscardCmd())
	return cmd
}

// parkedFlags choose among what is parked.
type parkedFlags struct{ what, since, match string }

func (f *parkedFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&f.what, "what", "", "only this `sort`: order, message, payment")
	flags.StringVar(&f.since, "since", "", "only what was parked last since then, a `time` back (24h) or an instant (2026-11-30T15:00:00Z)")
	flags.StringVar(&f.match, "match", "", "only with this `text` in the reason")
}

func (f *parkedFlags) filter(now time.Time) (orders.ParkedFilter, error) {
	filter := orders.ParkedFilter{What: f.what, Reason: f.match}
	if f.what != "" && !slices.Contains([]string{orders.ParkedOrder, orders.ParkedMessage, orders.ParkedPayment}, f.what) {
		return filter, usage("--what %q: it is order, message or payment", f.what)
	}
	if f.since == "" {
		return filter, nil
	}
	if back, err := time.ParseDuration(f.since); err == nil && back > 0 {
		filter.Since = now.Add(-back)
		return filter, nil
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime, time.DateOnly} {
		if at, err := time.ParseInLocation(layout, f.since, time.UTC); err == nil {
			filter.Since = at
			return filter, nil
		}
	}
	return filter, usage("--since %q: write a duration back from now, such as 24h, or an instant in UTC, such as 2026-11-30T15:00:00Z", f.since)
}

// withStore runs do on a store of the role.
func (a *app) withStore(cmd *cobra.Command, r role, do func(*orders.Store) error) error {
	cfg, err := a.load(cmd)
	if err != nil {
		return err
	}
	store, err := a.open(cfg, r)
	if err != nil {
		return err
	}
	err = do(store)
	if my, ok := errors.AsType[*mysql.MySQLError](err); ok && (my.Number == unknownColumn || my.Number == unknownTable) {
		err = fmt.Errorf("%w; the tables are those of an older version: run \"lapse migrate up\"", err)
	}
	return errors.Join(err, store.Close())
}

// The server's errors for what a later schema has.
const (
	unknownColumn = 1054
	unknownTable  = 1146
)

func (a *app) parkedListCmd() *cobra.Command {
	var chosen parkedFlags
	var state, after string
	var limit int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List what is parked, the newest first",
		Long: `Lists what is parked and waits for somebody, what was parked last first. TIMES is how often it was parked, LAST when it
was the last time, in UTC. It reads as mysql.dsn_read.`,
		Example: `  lapse parked list
  lapse parked list --what message --since 24h --match 'dead letter'
  lapse parked list --state all --json | jq -r '.parked[].ref'`,
		Args: a.exactly(),
		RunE: a.begin(func(cmd *cobra.Command, _ []string) error {
			filter, err := chosen.filter(time.Now())
			if err != nil {
				return err
			}
			switch state {
			case orders.StateParked, orders.StateRetried, orders.StateDiscarded:
				filter.States = []string{state}
			case "all":
				filter.States = []string{orders.StateParked, orders.StateRetried, orders.StateDiscarded}
			default:
				return usage("--state %q: it is parked, retried, discarded or all", state)
			}
			if limit < 1 || limit > 999 {
				return usage("--limit %d: it is 1 to 999", limit)
			}
			filter.Limit = limit + 1 // the one behind the page says whether there is more
			return a.withStore(cmd, roleRead, func(store *orders.Store) error {
				if after != "" {
					id, err := parkedID(after)
					if err != nil {
						return err
					}
					row, err := store.GetParked(cmd.Context(), id)
					if err != nil {
						return fmt.Errorf("continue after %d: %w", id, err)
					}
					filter.After = &row
				}
				rows, err := store.ListParked(cmd.Context(), filter)
				if err != nil {
					return err
				}
				more := len(rows) > limit
				rows = rows[:min(len(rows), limit)]
				if asJSON {
					return a.writeParked(rows, more)
				}
				a.printParked(rows, more, state)
				return nil
			})
		}),
	}
	chosen.add(cmd)
	cmd.Flags().StringVar(&state, "state", orders.StateParked, "in this `state`: parked, retried, discarded, or all")
	cmd.Flags().IntVar(&limit, "limit", listed, "at most this `number`")
	cmd.Flags().StringVar(&after, "after", "", "continue behind this `ID`, the last of the page before")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func parkedID(text string) (int64, error) {
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil || id < 1 {
		return 0, usage("%q is no id of something parked; 'lapse parked list' has them in its first column", text)
	}
	return id, nil
}

func (a *app) printParked(rows []orders.ParkedRow, more bool, state string) {
	if len(rows) == 0 {
		fmt.Fprintln(a.stdout, "nothing here")
		return
	}
	p := a.page()
	table := [][]string{{"ID", "WHAT", "REF", "TIMES", "LAST", "STATE", "REASON"}}
	for _, r := range rows {
		table = append(table, []string{strconv.FormatInt(r.ID, 10), r.What, visible(r.Ref), strconv.FormatInt(r.Times, 10), stamp(r.LastAt), r.State, visible(r.Reason)})
	}
	if state != "all" { // it is the same in every line
		for i, line := range table {
			table[i] = slices.Delete(line, 5, 6)
		}
	}
	last := len(table[0]) - 1
	widths := make([]int, last)
	for _, line := range table {
		for i := range widths {
			widths[i] = max(widths[i], columns(line[i]))
		}
	}
	for _, line := range table {
		var b strings.Builder
		for i, n := range widths {
			b.WriteString(pad(line[i], n) + "  ")
		}
		reason := line[last]
		if p.width > 0 {
			reason = cut(reason, max(p.width-1-columns(b.String()), 20))
		}
		fmt.Fprintln(a.stdout, b.String()+reason)
	}
	if more {
		fmt.Fprintf(a.stdout, "there are more: add --after %d, or raise --limit\n", rows[len(rows)-1].ID)
	}
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") }

// parkedJSON is how something parked is printed for other programs.
type parkedJSON struct {
	ID            int64        `json:"id"`
	What          string       `json:"what"`
	Ref           string       `json:"ref"`
	Reason        string       `json:"reason"`
	State         string       `json:"state"`
	Times         int64        `json:"times"`
	FirstAt       why.Instant  `json:"first_at"`
	LastAt        why.Instant  `json:"last_at"`
	HandledAt     *why.Instant `json:"handled_at,omitempty"`
	HandledBy     string       `json:"handled_by,omitempty"`
	HandledReason string       `json:"handled_reason,omitempty"`
	Size          int64        `json:"size"`
	// Of show alone. Body is there where it is text; the base64 always.
	Body       string   `json:"body,omitempty"`
	BodyBase64 string   `json:"body_base64,omitempty"`
	Orders     []string `json:"orders,omitempty"`
}

func jsonOf(r orders.ParkedRow) parkedJSON {
	j := parkedJSON{ID: r.ID, What: r.What, Ref: r.Ref, Reason: r.Reason, State: r.State, Times: r.Times, FirstAt: why.Instant{Time: r.FirstAt}, LastAt: why.Instant{Time: r.LastAt},
		HandledBy: r.HandledBy, HandledReason: r.HandledReason, Size: r.Size}
	if r.HandledAt != nil {
		j.HandledAt = &why.Instant{Time: *r.HandledAt}
	}
	return j
}

func (a *app) writeParked(rows []orders.ParkedRow, more bool) error {
	list := struct {
		Parked []parkedJSON `json:"parked"`
		After  int64        `json:"after,omitempty"` // for the next page
	}{Parked: make([]parkedJSON, len(rows))}
	for i, r := range rows {
		list.Parked[i] = jsonOf(r)
	}
	if more {
		list.After = rows[len(rows)-1].ID
	}
	return a.writeJSON(list)
}

func (a *app) parkedShowCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show something parked with its body",
		Long: `Shows something parked with all that is known of it, and the orders in it. A body that is text is printed with what
could steer the terminal escaped; of any other the first 1,024 bytes in hexadecimal. --json has the whole body in
base64. It reads as mysql.dsn_read.`,
		Example: `  lapse parked show 12
  lapse parked show 12 --json | jq -r .body_base64 | base64 -d > body`,
		Args: a.exactly("ID"),
		RunE: a.begin(func(cmd *cobra.Command, args []string) error {
			id, err := parkedID(args[0])
			if err != nil {
				return err
			}
			return a.withStore(cmd, roleRead, func(store *orders.Store) error {
				r, err := store.GetParked(cmd.Context(), id)
				if err != nil {
					return err
				}
				var inside []string
				if e, err := orders.DecodeExpiry(r.Body); r.What == orders.ParkedMessage && err == nil {
					inside = e.Orders
				}
				if asJSON {
					j := jsonOf(r)
					j.Orders = inside
					j.BodyBase64 = base64.StdEncoding.EncodeToString(r.Body)
					if utf8.Valid(r.Body) {
						j.Body = string(r.Body)
					}
					return a.writeJSON(j)
				}
				a.printOneParked(r, inside)
				return nil
			})
		}),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, with the body in base64")
	return cmd
}

func (a *app) printOneParked(r orders.ParkedRow, inside []string) {
	p := a.page()
	line := func(name, format string, args ...any) {
		fmt.Fprintf(a.stdout, "%-9s%s\n", name, p.fold(visible(fmt.Sprintf(format, args...)), 9))
	}
	line("what", "%s %s", r.What, r.Ref)
	line("state", "%s", r.State)
	if r.Times > 1 {
		line("parked", "%d times, first %s, last %s UTC", r.Times, stamp(r.FirstAt), stamp(r.LastAt))
	} else {
		line("parked", "%s UTC", stamp(r.FirstAt))
	}
	line("reason", "%s", r.Reason)
	if r.HandledAt != nil {
		line("handled", "%s", handledText(r))
	}
	if len(inside) > 0 {
		line("orders", "%s", strings.Join(inside, ", "))
	}
	if r.What == orders.ParkedOrder {
		line("story", "lapse why %s", r.Ref)
	}
	if r.State == orders.StateParked {
		line("next", "lapse parked retry %d, or lapse parked discard %d --reason TEXT", r.ID, r.ID)
	}
	if len(r.Body) == 0 {
		line("body", "none")
		return
	}
	if isText(r.Body) {
		line("body", "%d bytes of text", len(r.Body))
		fmt.Fprintln(a.stdout, p.fold(visible(string(r.Body)), 0))
		return
	}
	shown := r.Body[:min(len(r.Body), dumped)]
	if len(shown) < len(r.Body) {
		line("body", "%d bytes, the first %d in hexadecimal; --json has all", len(r.Body), len(shown))
	} else {
		line("body", "%d bytes in hexadecimal", len(r.Body))
	}
	fmt.Fprint(a.stdout, hex.Dump(shown)) // its right side has ASCII alone, with dots for the rest
}

// isText says that a person gets more from a body's characters than from its bytes: it is UTF-8, and few of its characters are not for
// printing.
func isText(body []byte) bool {
	if !utf8.Valid(body) {
		return false
	}
	all, odd := 0, 0
	for _, r := range string(body) {
		all++
		if !unicode.IsPrint(r) && !unicode.IsSpace(r) {
			odd++
		}
	}
	return odd*10 <= all
}

func handledText(r orders.ParkedRow) string {
	if r.HandledReason != "" {
		return fmt.Sprintf("discarded %s UTC by %s: \"%s\"", stamp(*r.HandledAt), r.HandledBy, r.HandledReason)
	}
	text := fmt.Sprintf("retried %s UTC by %s", stamp(*r.HandledAt), r.HandledBy)
	if r.State == orders.StateParked {
		text += ", and parked again"
	}
	return text
}

// handling is a command that does something with what is parked: with some by their ids, or with all that the flags choose.
type handling struct {
	verb, done string // retry, retried
	chosen     parkedFlags
	all, yes   bool
	json       bool
	actor      string
	do         func(ctx context.Context, store *orders.Store, id int64, actor string) (handled, error)
}

// handled is what became of one thing.
type handled struct {
	ID    int64  `json:"id"`
	What  string `json:"what,omitempty"`
	Ref   string `json:"ref,omitempty"`
	State string `json:"state,omitempty"`
	// Done is false where it had been dealt with before, or cannot be.
	Done   bool                       `json:"done"`
	Orders map[orders.RetryResult]int `json:"orders,omitempty"`
	Refund bool                       `json:"refund,omitempty"`
	Event  bool                       `json:"event,omitempty"`
	Error  string                     `json:"error,omitempty"`

	says string
}

func (h *handling) flags(cmd *cobra.Command) {
	h.chosen.add(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&h.all, "all", false, h.verb+" all that is parked, or all that --what, --since and --match choose")
	flags.BoolVar(&h.yes, "yes", false, "with --all: do it; without, it says how many there are")
	flags.StringVar(&h.actor, "actor", "", "who, as it shall stand in the stories of the orders; default cli:$USER")
	flags.BoolVar(&h.json, "json", false, "print JSON: a list of what became of each")
}

// run does it. What cannot be done is told, and the others are done; the exit code is then 1.
func (h *handling) run(a *app, cmd *cobra.Command, args []string) error {
	filter, err := h.chosen.filter(time.Now())
	if err != nil {
		return err
	}
	var ids []int64
	for _, text := range args {
		id, err := parkedID(text)
		if err != nil {
			return err
		}
		ids = append(ids, id)
	}
	switch {
	case h.all && len(ids) > 0:
		return usage("give ids, or --all, not both")
	case !h.all && h.chosen != (parkedFlags{}):
		return usage("--what, --since and --match choose among --all; without it, give ids")
	case !h.all && len(ids) == 0:
		return usage("give the ids of what to %s, as 'lapse parked list' has them, or --all", h.verb)
	}
	return a.withStore(cmd, roleAPI, func(store *orders.Store) error {
		if h.all && !h.yes {
			n, err := countParked(cmd.Context(), store, filter)
			if err != nil {
				return err
			}
			if n > 0 {
				return usage("that would %s %d; say --yes if that is meant ('lapse parked list' shows them)", h.verb, n)
			}
		}
		results := []handled{}
		failed := 0
		one := func(id int64) error {
			r, err := h.do(cmd.Context(), store, id, a.actor(h.actor))
			r.ID = id
			switch {
			case errors.Is(err, orders.ErrCannotRetry), errors.Is(err, orders.ErrNotParked):
				failed++
				r.Error = err.Error()
				if !h.json {
					fmt.Fprintf(a.stderr, "lapse: %s\n", visible(r.Error))
				}
			case errors.Is(err, orders.ErrInvalid):
				return usageError{err}
			case err != nil:
				return err
			case !h.json:
				fmt.Fprintln(a.stdout, visible(r.says))
			}
			results = append(results, r)
			return nil
		}
		if h.all {
			err = eachParked(cmd.Context(), store, filter, func(r orders.ParkedRow) error { return one(r.ID) })
		}
		for i := 0; i < len(ids) && err == nil; i++ {
			err = one(ids[i])
		}
		if h.json {
			err = errors.Join(err, a.writeJSON(results))
		} else if h.all && err == nil {
			fmt.Fprintf(a.stdout, "%d %s\n", len(results)-failed, h.done)
		}
		if err == nil && failed > 0 {
			err = fmt.Errorf("%d of %d were not %s", failed, len(results), h.done)
		}
		return err
	})
}

// eachParked visits all that a filter chooses, the newest first. What is parked while it runs is newer, and left alone.
func eachParked(ctx context.Context, store *orders.Store, filter orders.ParkedFilter, visit func(orders.ParkedRow) error) error {
	filter.Limit = pageSize
	for {
		rows, err := store.ListParked(ctx, filter)
		if err != nil {
			return err
		}
		for _, r := range rows {
			if err := visit(r); err != nil {
				return err
			}
		}
		if len(rows) < pageSize {
			return nil
		}
		filter.After = &rows[len(rows)-1]
	}
}

func countParked(ctx context.Context, store *orders.Store, filter orders.ParkedFilter) (n int, err error) {
	err = eachParked(ctx, store, filter, func(orders.ParkedRow) error {
		n++
		return nil
	})
	return n, err
}

func (a *app) parkedRetryCmd() *cobra.Command {
	h := &handling{verb: "retry", done: "retried", do: func(ctx context.Context, store *orders.Store, id int64, actor string) (handled, error) {
		r, err := store.RetryParked(ctx, id, actor)
		if err != nil {
			return handled{}, err
		}
		return handledOf(r), nil
	}}
	cmd := &cobra.Command{
		Use:   "retry ID…",
		Short: "Give what is parked back to the normal path",
		Long: `Gives what is parked back to the normal path. An order, and each order of a message, gets a timed message again: at once
if it is overdue, and a hold on it ends. The parked message itself is never sent again. A refund that was given up is
tried again. A retry of an order that is paid or cancelled changes nothing, so a retry is harmless; what fails again
is parked again, and counted.

What no retry can help is refused with the reason: a message that cannot be read, an order that does not exist, a
payment notice that contradicts an earlier one. Look at it, and discard it. The others are done all the same; the
exit code is then 1. It works as mysql.dsn.`,
		Example: `  lapse parked retry 12 13
  lapse parked retry --all --what order --match 'connection refused' --yes`,
		Args: cobra.ArbitraryArgs,
		RunE: a.begin(func(cmd *cobra.Command, args []string) error { return h.run(a, cmd, args) }),
	}
	h.flags(cmd)
	return cmd
}

// retryWords say in words what a retry did for n orders.
var retryWords = map[orders.RetryResult]string{
	orders.RetryResend:   "given back to the relay",
	orders.RetryFinal:    "left alone, being paid or cancelled",
	orders.RetryExempt:   "left alone, having no deadline",
	orders.RetryNotFound: "not there",
}

func handledOf(r orders.Retry) handled {
	p := r.Parked
	h := handled{What: p.What, Ref: p.Ref, State: p.State, Done: r.Done, Refund: r.Refund, Event: r.Event}
	of := fmt.Sprintf("%d (%s %s): ", p.ID, p.What, p.Ref)
	if !r.Done {
		h.says = of + handledBefore(p)
		return h
	}
	if r.Refund {
		h.says = of + "the refund is tried again"
		return h
	}
	if r.Event {
		h.says = of + "the event is given back to the relay"
		return h
	}
	h.Orders = map[orders.RetryResult]int{}
	for _, o := range r.Orders {
		h.Orders[o.Result]++
	}
	if p.What == orders.ParkedOrder {
		h.says = of + map[orders.RetryResult]string{
			orders.RetryResend: "given back to the relay",
			orders.RetryFinal:  "it is paid or cancelled, and left as it is",
			orders.RetryExempt: "it has no deadline, and is left as it is",
		}[r.Orders[0].Result]
		return h
	}
	var parts []string
	for _, result := range []orders.RetryResult{orders.RetryResend, orders.RetryFinal, orders.RetryExempt, orders.RetryNotFound} {
		if h.Orders[result] == 0 {
			continue
		}
		noun := "orders"
		if h.Orders[result] == 1 {
			noun = "order"
		}
		parts = append(parts, fmt.Sprintf("%d %s %s", h.Orders[result], noun, retryWords[result]))
	}
	h.says = of + strings.Join(parts, ", ")
	return h
}

func handledBefore(p orders.ParkedRow) string {
	return handledText(p) + "; nothing changed"
}

func (a *app) parkedDiscardCmd() *cobra.Command {
	var reason string
	h := &handling{verb: "discard", done: "discarded"}
	h.do = func(ctx context.Context, store *orders.Store, id int64, actor string) (handled, error) {
		p, done, err := store.DiscardParked(ctx, id, actor, reason)
		if err != nil {
			return handled{}, err
		}
		says := fmt.Sprintf("%d (%s %s): ", p.ID, p.What, p.Ref)
		if done {
			says += "discarded"
		} else {
			says += handledBefore(p)
		}
		return handled{What: p.What, Ref: p.Ref, State: p.State, Done: done, says: says}, nil
	}
	cmd := &cobra.Command{
		Use:   "discard ID… --reason TEXT",
		Short: "Record that nothing is to be done about what is parked",
		Long: `Records that nothing is to be done about what is parked, who decided it, and why; the body is kept. It changes nothing
else: an unpaid order stays unpaid, and reconcile cancels it when it is overdue. It works as mysql.dsn.`,
		Example: `  lapse parked discard 14 --reason 'a trial message of the new shop'
  lapse parked discard --all --what message --match 'cannot be read' --reason 'ticket 812' --yes`,
		Args: cobra.ArbitraryArgs,
		RunE: a.begin(func(cmd *cobra.Command, args []string) error {
			if strings.TrimSpace(reason) == "" {
				return usage("discard needs --reason: it stays with what was discarded, for whoever asks later")
			}
			return h.run(a, cmd, args)
		}),
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, in your own `text`; required")
	h.flags(cmd)
	return cmd
}

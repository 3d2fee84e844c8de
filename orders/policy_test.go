package orders_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

func policies(t *testing.T, text string) orders.Config {
	t.Helper()
	list, err := orders.ParsePolicies(text)
	if err != nil {
		t.Fatal(err)
	}
	return orders.Config{Policies: list}
}

// case CFG-4: the names of channels and methods are taken letter by letter.
func TestTheFirstPolicyThatFitsGivesTheDeadline(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, policies(t, `
		channel=kiosk method=cash  timeout=5m    # before the next line, which fits too
		method=bank_transfer timeout=never; method=cash timeout=never
		channel=Web method=wallet timeout=40m grace=10m
		channel=kiosk timeout=10m
		method=invoice grace=48h
	`)))
	never := time.Duration(-1)
	for _, c := range []struct {
		channel, method string
		payBy, deadline time.Duration
	}{
		{"kiosk", "cash", 5 * time.Minute, 5 * time.Minute},
		{"web", "cash", never, never},
		{"kiosk", "bank_transfer", never, never},
		{"kiosk", "card", 10 * time.Minute, 10 * time.Minute},
		{"kiosk", "", 10 * time.Minute, 10 * time.Minute},
		{"Web", "wallet", 40 * time.Minute, 50 * time.Minute},
		{"web", "wallet", 30 * time.Minute, 30 * time.Minute},
		{"Web", "Wallet", 30 * time.Minute, 30 * time.Minute},
		{"web", "invoice", 30 * time.Minute, 48*time.Hour + 30*time.Minute},
		{"", "", 30 * time.Minute, 30 * time.Minute},
	} {
		o := b.place(func(n *orders.NewOrder) { n.Channel, n.PaymentMethod = c.channel, c.method })
		for what, got := range map[string]orders.Order{"placed": o, "stored": b.get(o.ID)} {
			if got.PaymentMethod != c.method {
				t.Errorf("%s: payment method %q, want %q", what, got.PaymentMethod, c.method)
			}
			for name, is := range map[string]struct {
				at   *time.Time
				want time.Duration
			}{"pay by": {got.PayBy, c.payBy}, "deadline": {got.DeadlineAt, c.deadline}} {
				if (is.at == nil) != (is.want == never) || is.at != nil && is.at.Sub(noon) != is.want {
					t.Errorf("%q by %q, %s: %s is %v, want %s after noon (-1ns: never)", c.channel, c.method, what, name, is.at, is.want)
				}
			}
		}
		_, there, err := b.store.Outbox(b.ctx, o.ID)
		if err != nil || there != (c.deadline != never) {
			t.Errorf("%q by %q: has an outbox row: %t, %v", c.channel, c.method, there, err)
		}
	}
	b.wantClean()
}

func TestATimeOfTheOrdersOwnComesBeforeThePolicies(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, policies(t, "method=cash timeout=never; timeout=40m grace=10m")))
	for name, c := range map[string]struct {
		change func(*orders.NewOrder)
		want   time.Duration
	}{
		"timeout":  {func(n *orders.NewOrder) { n.PaymentMethod, n.Timeout = "cash", 2*time.Hour }, 2 * time.Hour},
		"deadline": {func(n *orders.NewOrder) { n.DeadlineAt = noon.Add(3 * time.Hour) }, 3 * time.Hour},
	} {
		o := b.place(c.change)
		if o.DeadlineAt == nil || o.DeadlineAt.Sub(noon) != c.want || !o.PayBy.Equal(*o.DeadlineAt) {
			t.Errorf("%s: deadline %v, pay by %v, want both %s after noon: it has no grace", name, o.DeadlineAt, o.PayBy, c.want)
		}
	}
	if o := b.place(noDeadline); o.DeadlineAt != nil || o.PayBy != nil {
		t.Errorf("deadline %v, pay by %v, want none", o.DeadlineAt, o.PayBy)
	}
}

func TestAnOrderWithNothingToPayIsNotCancelledAsUnpaid(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, policies(t, "timeout=10m")))
	free := b.place(func(n *orders.NewOrder) { n.Amount = 0 })
	hold := b.place(func(n *orders.NewOrder) { n.Amount, n.Timeout = 0, time.Minute }) // a time is named, so it is meant
	priced := b.place()
	later := b.on(b.at(noon.Add(24*time.Hour), orders.Config{}))
	var got []orders.Result
	for _, out := range later.cancelDue(free.ID, hold.ID, priced.ID) {
		got = append(got, out.Result)
	}
	if want := []orders.Result{orders.ResultExempt, orders.ResultCancelled, orders.ResultCancelled}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if free.DeadlineAt != nil {
		t.Errorf("it was promised the deadline %s", free.DeadlineAt)
	}
	if out, err := later.store.Cancel(b.ctx, free.ID, "u1", "not wanted any more"); err != nil || out.Result != orders.ResultCancelled {
		t.Errorf("by hand: %+v, %v", out, err)
	}
	later.wantClean()
}

// TestMoneyThatComesWithinTheGraceIsAccepted: the customer is told pay_by, and the order is cancelled at the deadline behind it.
func TestMoneyThatComesWithinTheGraceIsAccepted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	cfg := policies(t, "method=wallet timeout=20m grace=10m")
	slow := func(n *orders.NewOrder) { n.PaymentMethod = "wallet" }
	b = b.on(b.at(noon, cfg))
	late, never := b.place(slow), b.place(slow)

	within := b.on(b.at(noon.Add(25*time.Minute), cfg))
	if out := within.cancelDue(late.ID); out[0].Result != orders.ResultNotDue || out[0].Remaining != 5*time.Minute {
		t.Errorf("5 minutes after pay_by: %+v", out[0])
	}
	if r := within.pay(late.ID); r.Outcome != orders.PaymentAccepted {
		t.Errorf("paid 5 minutes after pay_by: %+v", r)
	}
	after := b.on(b.at(noon.Add(30*time.Minute), cfg))
	if out := after.cancelDue(late.ID, never.ID); out[0].Result != orders.ResultAlreadyPaid || out[1].Result != orders.ResultCancelled || out[1].Lateness != 0 {
		t.Errorf("at the deadline: %+v", out)
	}
	after.wantClean()
}

func TestGraceStaysWithAnOrderThatIsExtended(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b = b.on(b.at(noon, policies(t, "timeout=20m grace=10m")))
	o := b.place()
	if _, err := b.store.ExtendDeadline(b.ctx, o.ID, noon.Add(time.Hour), "u1"); err != nil {
		t.Fatal(err)
	}
	if got := b.get(o.ID); got.PayBy.Sub(noon) != 50*time.Minute || got.DeadlineAt.Sub(noon) != time.Hour {
		t.Errorf("pay by %s, deadline %s", got.PayBy, got.DeadlineAt)
	}
}

// case CFG-6, PAY-6, PAY-7
func TestWhatAPolicyPromisedStaysWhenThePoliciesChange(t *testing.T) {
	t.Parallel()
	b := setup(t)
	before := policies(t, "channel=admin timeout=never; method=transfer timeout=3h; timeout=20m grace=10m")
	after := policies(t, "channel=admin timeout=1m; timeout=never")
	b = b.on(b.at(noon, before))
	admin := b.place(func(n *orders.NewOrder) { n.Channel = "admin" })
	transfer := b.place(func(n *orders.NewOrder) { n.PaymentMethod = "transfer" })
	card := b.place(func(n *orders.NewOrder) { n.PaymentMethod = "card" })
	for _, c := range []struct {
		minutes int
		want    []orders.Result
	}{
		{20, []orders.Result{orders.ResultExempt, orders.ResultNotDue, orders.ResultNotDue}},
		{30, []orders.Result{orders.ResultExempt, orders.ResultNotDue, orders.ResultCancelled}},
		{180, []orders.Result{orders.ResultExempt, orders.ResultCancelled, orders.ResultAlreadyCancelled}},
	} {
		then := b.on(b.at(noon.Add(time.Duration(c.minutes)*time.Minute), after))
		var got []orders.Result
		for _, out := range then.cancelDue(admin.ID, transfer.ID, card.ID) {
			got = append(got, out.Result)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("after %d minutes: %v, want %v", c.minutes, got, c.want)
		}
		if o := then.get(card.ID); !o.PayBy.Equal(*card.PayBy) || !o.DeadlineAt.Equal(*card.DeadlineAt) {
			t.Errorf("after %d minutes: pay by %s, deadline %s", c.minutes, o.PayBy, o.DeadlineAt)
		}
	}
}

func TestRepeatedRequestGetsTheFirstPromise(t *testing.T) {
	t.Parallel()
	b := setup(t)
	n := orders.NewOrder{Currency: "EUR", Amount: 5, PaymentMethod: "wallet"}
	first, _, err := b.at(noon, policies(t, "method=wallet timeout=20m grace=10m")).PlaceOnce(b.ctx, "K", oneHash, n)
	if err != nil {
		t.Fatal(err)
	}
	again, repeated, err := b.at(noon.Add(time.Minute), policies(t, "timeout=never")).PlaceOnce(b.ctx, "K", oneHash, n)
	if err != nil || !repeated || again.PayBy == nil || !again.PayBy.Equal(*first.PayBy) || !again.DeadlineAt.Equal(*first.DeadlineAt) || again.PaymentMethod != "wallet" {
		t.Errorf("first %+v\nagain %+v, repeated %t, %v", first, again, repeated, err)
	}
}

func TestPoliciesThatMakeNoSenseAreRefusedByName(t *testing.T) {
	t.Parallel()
	for text, says := range map[string]string{
		"channel":                            `"channel" is not NAME=VALUE`,
		"channel=web shop timeout=5m":        `"shop" is not NAME=VALUE (a name with a blank`,
		"channel= timeout=5m":                `"channel=" is not NAME=VALUE`,
		"chanel=web timeout=5m":              `there is no "chanel"`,
		"channel=web channel=app timeout=5m": "channel is given twice",
		"channel=web":                        "says nothing",
		"timeout=30":                         "timeout=30 is not a positive duration",
		"timeout=0s":                         "timeout=0s is not a positive duration",
		"timeout=-5m":                        "timeout=-5m is not a positive duration",
		"timeout=5m grace=never":             "grace=never is not a positive duration",
		"timeout=never grace=5m":             "neither timeout nor grace",
		"timeout=1500us":                     "whole milliseconds",
		"timeout=5m\nchannel=web timeout=9m": `"channel=web timeout=9m0s" never holds`,
		"channel=web timeout=5m; channel=web method=card timeout=9m": "never holds",
		"channel=" + strings.Repeat("x", 65) + " timeout=5m":         "more than 64",
	} {
		if list, err := orders.ParsePolicies(text); !errors.Is(err, orders.ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, %v, want %q", text, list, err, says)
		}
	}
	for says, p := range map[string]orders.Policy{
		"time is negative":                {Timeout: -time.Second},
		"later than MaxLifetime 168h0m0s": {Timeout: 2_562_047 * time.Hour, Grace: 48 * time.Minute},
		"later than MaxLifetime 168h":     {Timeout: 167 * time.Hour, Grace: 2 * time.Hour},
		`channel "web " begins`:           {Channel: "web ", Never: true},
	} {
		if _, err := orders.Open("u:p@tcp(127.0.0.1:1)/d", orders.Config{Policies: []orders.Policy{p}}); !errors.Is(err, orders.ErrInvalid) || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v, want %q", p, err, says)
		}
	}
}

func TestPoliciesReadWhatTheyWrite(t *testing.T) {
	t.Parallel()
	want := []orders.Policy{{Channel: "a", PaymentMethod: "b", Timeout: time.Minute, Grace: time.Second}, {PaymentMethod: "b", Never: true}, {Channel: "c", Grace: time.Hour}}
	var lines []string
	for _, p := range want {
		lines = append(lines, p.String())
	}
	got, err := orders.ParsePolicies(strings.Join(lines, ";"))
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	if got, err := orders.ParsePolicies(" \n# nothing\n;"); err != nil || len(got) != 0 {
		t.Errorf("%v, %v, want none", got, err)
	}
}

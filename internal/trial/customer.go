package trial

import (
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// Kind is how a customer behaves.
type Kind string

// The kinds of customers. Each group of [deckSize] customers in a row has all of them.
const (
	NeverPays      Kind = "never_pays"
	PaysEarly      Kind = "pays_early"
	PaysLastMoment Kind = "pays_last_moment" // in the last 50 ms before the deadline
	PaysLate       Kind = "pays_late"
	PaysTwice      Kind = "pays_twice" // two transactions
	PaysTooLittle  Kind = "pays_too_little"
	PaysTooMuch    Kind = "pays_too_much"
	RepeatsNotice  Kind = "repeats_notice" // one transaction, reported three times at once
	CancelsByHand  Kind = "cancels_by_hand"
	Extends        Kind = "extends" // gets more time; every second one then pays in it
)

// deck is the mix of one group of customers. A dealt deck, not a die: every kind occurs in every run of at least deckSize orders, whatever
// the seed is.
var deck = []struct {
	kind  Kind
	count int
	says  string
}{
	{PaysEarly, 4, "pay early"},
	{PaysLastMoment, 2, "pay in the last 50 ms"},
	{PaysLate, 2, "pay late"},
	{PaysTwice, 1, "pay twice"},
	{PaysTooLittle, 1, "pay too little"},
	{PaysTooMuch, 1, "pay too much"},
	{RepeatsNotice, 1, "pay, notice repeated"},
	{CancelsByHand, 1, "cancel by hand"},
	{Extends, 2, "get an extension"},
	{NeverPays, 5, "never pay"},
}

// deckSize is the sum of the counts in deck.
const deckSize = 20

// Kinds lists all kinds in the order of a report.
func Kinds() []Kind {
	kinds := make([]Kind, len(deck))
	for i, d := range deck {
		kinds[i] = d.kind
	}
	return kinds
}

// Says puts the kind in words.
func (k Kind) Says() string {
	for _, d := range deck {
		if d.kind == k {
			return d.says
		}
	}
	return string(k)
}

// Notice is a gateway's message that money arrived. The same Transaction of one customer is the same payment.
type Notice struct {
	Transaction int
	Amount      int64 // minor units
}

// Act is one thing that a customer does, once: the one of Notices, Extend and Cancel that is set.
type Act struct {
	// After counts from placing; with ToDeadline set, from the deadline that the checkout was told last, and is negative before it.
	After      time.Duration
	ToDeadline bool
	// Notices are sent all at once.
	Notices []Notice
	// Extend asks for this much more time, from the deadline that was told last.
	Extend time.Duration
	// Cancel cancels by hand.
	Cancel bool
}

// Customer is one order and what happens to it.
type Customer struct {
	Number int // 0, 1, 2, … in the order of placing
	Kind   Kind
	Items  []orders.Item
	Amount int64 // minor units
	Acts   []Act // in the order of time
}

// TimesOut reports whether the customer's order ends at its deadline, if it can be placed at all.
func (c Customer) TimesOut() bool {
	switch c.Kind {
	case NeverPays, PaysLate, PaysTooLittle:
		return true
	case Extends:
		return len(c.Acts) == 1
	case PaysEarly, PaysLastMoment, PaysTwice, PaysTooMuch, RepeatsNotice, CancelsByHand:
	}
	return false
}

// currency of every order of a trial.
const currency = "EUR"

// SKU is one article of the shop. Stock below zero means unlimited.
type SKU struct {
	Name  string
	Stock int64
}

// Shelf is what the shop of a run sells: many pieces of most articles, one article without limit, and two so scarce that they run out.
// The names begin with the run's name, so that runs in one database do not share stock.
func Shelf(run string, count int) []SKU {
	shelf := make([]SKU, 0, articles+scarceArticles)
	for i := range articles {
		stock := int64(count) * maxQuantity * maxLines
		if i == 0 {
			stock = -1
		}
		shelf = append(shelf, SKU{Name: fmt.Sprintf("%s-article-%02d", run, i), Stock: stock})
	}
	for i := range scarceArticles {
		// A tenth of the orders wants a scarce article, one piece and a half of it on average: each article is asked for some
		// count*0.075 times. A third of that runs out, and comes back with each cancel.
		shelf = append(shelf, SKU{Name: fmt.Sprintf("%s-scarce-%d", run, i+1), Stock: max(int64(count)/40, 1)})
	}
	return shelf
}

const (
	articles       = 10
	scarceArticles = 2
	maxLines       = 3
	maxQuantity    = 2
)

// Draw makes count customers of a run. The same seed, count and timeout give the same customers, apart from the run's name in their SKUs.
func Draw(run string, seed uint64, count int, timeout time.Duration) []Customer {
	// A stream of its own (the second word), so that other things may be drawn from the same seed later.
	rng := rand.New(rand.NewPCG(seed, 0x6c61707365)) //nolint:gosec // has to be repeatable, not secret
	shelf := Shelf(run, count)
	customers := make([]Customer, 0, count)
	var hand []Kind
	extended := 0
	for i := range count {
		if len(hand) == 0 {
			hand = deal(rng)
		}
		c := Customer{Number: i, Kind: hand[0]}
		hand = hand[1:]
		c.Items = drawItems(rng, shelf)
		for _, it := range c.Items {
			c.Amount += it.Quantity * it.Price
		}
		if c.Kind == Extends {
			extended++
		}
		c.Acts = drawActs(rng, c, timeout, extended%2 == 1)
		customers = append(customers, c)
	}
	return customers
}

func deal(rng *rand.Rand) []Kind {
	hand := make([]Kind, 0, deckSize)
	for _, d := range deck {
		for range d.count {
			hand = append(hand, d.kind)
		}
	}
	rng.Shuffle(len(hand), func(i, j int) { hand[i], hand[j] = hand[j], hand[i] })
	return hand
}

func drawItems(rng *rand.Rand, shelf []SKU) []orders.Item {
	lines := 1 + rng.IntN(maxLines)
	chosen := rng.Perm(articles)[:lines]
	if rng.IntN(10) == 0 {
		chosen[0] = articles + rng.IntN(scarceArticles)
	}
	items := make([]orders.Item, 0, lines)
	for _, n := range chosen {
		items = append(items, orders.Item{
			SKU: shelf[n].Name, Quantity: 1 + rng.Int64N(maxQuantity), Price: 500 + 50*rng.Int64N(100),
		})
	}
	return items
}

// drawActs draws when a customer does what. Shares of the timeout leave the last tenth alone, so that only those who mean it come close
// to the deadline.
func drawActs(rng *rand.Rand, c Customer, timeout time.Duration, paysInExtension bool) []Act {
	share := func(from, to float64) time.Duration {
		return time.Duration((from + (to-from)*rng.Float64()) * float64(timeout))
	}
	upTo := func(d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d)) + 1) }
	pay := Notice{Transaction: 1, Amount: c.Amount}
	switch c.Kind {
	case PaysEarly:
		return []Act{{After: share(0.05, 0.7), Notices: []Notice{pay}}}
	case PaysLastMoment:
		return []Act{{ToDeadline: true, After: -upTo(50 * time.Millisecond), Notices: []Notice{pay}}}
	case PaysLate:
		// Some come while the order is still being cancelled and win, most come too late.
		return []Act{{ToDeadline: true, After: upTo(2 * time.Second), Notices: []Notice{pay}}}
	case PaysTwice:
		again := Notice{Transaction: 2, Amount: c.Amount}
		first := share(0.05, 0.6)
		if rng.IntN(2) == 0 {
			return []Act{{After: first, Notices: []Notice{pay, again}}}
		}
		return []Act{{After: first, Notices: []Notice{pay}}, {After: first + share(0.02, 0.3), Notices: []Notice{again}}}
	case PaysTooLittle:
		return []Act{{After: share(0.05, 0.8), Notices: []Notice{{Transaction: 1, Amount: c.Amount - 1 - rng.Int64N(c.Amount/2)}}}}
	case PaysTooMuch:
		return []Act{{After: share(0.05, 0.8), Notices: []Notice{{Transaction: 1, Amount: c.Amount + 1 + rng.Int64N(c.Amount)}}}}
	case RepeatsNotice:
		return []Act{{After: share(0.05, 0.8), Notices: []Notice{pay, pay, pay}}}
	case CancelsByHand:
		return []Act{{After: share(0.05, 0.8), Cancel: true}}
	case Extends:
		more := share(0.2, 0.35)
		acts := []Act{{After: share(0.3, 0.8), Extend: more}}
		if paysInExtension {
			acts = append(acts, Act{ToDeadline: true, After: -more / 2, Notices: []Notice{pay}})
		}
		return acts
	case NeverPays:
	}
	return nil
}

package trial

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/lapse-orders/lapse/orders"
)

// Ledger is what the load generator was told, answer by answer. It is safe for concurrent use.
type Ledger struct {
	mu       sync.Mutex // guards the accounts and what is in them
	accounts map[int64]*Account
}

// Account is the page of one order.
type Account struct {
	ID     int64
	Kind   Kind
	Amount int64
	// Placed: the checkout was told that the order is there. Refused: it was told why it is not. Neither: no answer came.
	Placed   bool
	Refused  string
	Deadline time.Time // as told last
	// Payments by transaction id.
	Payments map[string]*PaymentAccount
	// Cancels are the answers to cancels by hand.
	Cancels []orders.Result
	// Failures are calls that ended without a result: the last error of each.
	Failures []string
	// Calls is the number of calls that were made about the order.
	Calls int
}

// PaymentAccount is one transaction of an order.
type PaymentAccount struct {
	Amount  int64
	Answers []orders.PaymentResult // one for each notice that was answered
}

// NewLedger makes an empty ledger.
func NewLedger() *Ledger { return &Ledger{accounts: map[int64]*Account{}} }

// open begins the page of an order that is about to be placed.
func (l *Ledger) open(id int64, c Customer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.accounts[id] = &Account{ID: id, Kind: c.Kind, Amount: c.Amount, Payments: map[string]*PaymentAccount{}}
}

// note changes the page of one order and counts one call.
func (l *Ledger) note(id int64, change func(*Account)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.accounts[id]
	a.Calls++
	change(a)
}

func (l *Ledger) placed(id int64, deadline time.Time) {
	l.note(id, func(a *Account) { a.Placed, a.Deadline = true, deadline })
}

func (l *Ledger) refused(id int64, why string) { l.note(id, func(a *Account) { a.Refused = why }) }

func (l *Ledger) extended(id int64, x orders.Extension) {
	l.note(id, func(a *Account) {
		if x.Extended {
			a.Deadline = x.DeadlineAt
		}
	})
}

func (l *Ledger) cancelled(id int64, r orders.Result) {
	l.note(id, func(a *Account) { a.Cancels = append(a.Cancels, r) })
}

func (l *Ledger) paid(id int64, transaction string, amount int64, r orders.PaymentResult) {
	l.note(id, func(a *Account) {
		p := a.Payments[transaction]
		if p == nil {
			p = &PaymentAccount{Amount: amount}
			a.Payments[transaction] = p
		}
		p.Answers = append(p.Answers, r)
	})
}

func (l *Ledger) failed(id int64, doing string, err error) {
	l.note(id, func(a *Account) { a.Failures = append(a.Failures, fmt.Sprintf("%s: %v", doing, err)) })
}

// deadline is the deadline of an order as it was told last.
func (l *Ledger) deadline(id int64) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.accounts[id].Deadline
}

// Counts gives how many orders were placed and refused so far, and the latest deadline among them.
func (l *Ledger) Counts() (placed, refused int, last time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.accounts {
		switch {
		case a.Placed:
			placed++
			if a.Deadline.After(last) {
				last = a.Deadline
			}
		case a.Refused != "":
			refused++
		}
	}
	return placed, refused, last
}

// Accounts gives copies of all pages, by order id.
func (l *Ledger) Accounts() []Account {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := make([]Account, 0, len(l.accounts))
	for _, id := range slices.Sorted(maps.Keys(l.accounts)) {
		a := *l.accounts[id]
		a.Cancels, a.Failures = slices.Clone(a.Cancels), slices.Clone(a.Failures)
		a.Payments = make(map[string]*PaymentAccount, len(a.Payments))
		for t, p := range l.accounts[id].Payments {
			a.Payments[t] = &PaymentAccount{Amount: p.Amount, Answers: slices.Clone(p.Answers)}
		}
		list = append(list, a)
	}
	return list
}

// accepted reports whether one of the order's payments was told accepted.
func (a Account) accepted() bool {
	for _, p := range a.Payments {
		for _, answer := range p.Answers {
			if answer.Outcome == orders.PaymentAccepted {
				return true
			}
		}
	}
	return false
}

// cancelledByHand reports whether one of the cancels by hand was told to have done it.
func (a Account) cancelledByHand() bool { return slices.Contains(a.Cancels, orders.ResultCancelled) }

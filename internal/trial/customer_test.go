package trial

import (
	"reflect"
	"slices"
	"testing"
	"time"
)

func TestTheSameSeedDrawsTheSameCustomers(t *testing.T) {
	t.Parallel()
	a, b := Draw("run", 7, 400, 10*time.Second), Draw("run", 7, 400, 10*time.Second)
	if !reflect.DeepEqual(a, b) {
		t.Fatal("two draws of seed 7 differ")
	}
	if reflect.DeepEqual(a, Draw("run", 8, 400, 10*time.Second)) {
		t.Fatal("seeds 7 and 8 draw the same")
	}
}

// The numbers are those of seed 1: a change of the drawing changes every demo, and has to be meant.
func TestSeedOneIsPinned(t *testing.T) {
	t.Parallel()
	c := Draw("run", 1, 3, 10*time.Second)
	var kinds []Kind
	var amounts []int64
	for _, c := range c {
		kinds, amounts = append(kinds, c.Kind), append(amounts, c.Amount)
	}
	if want := []Kind{NeverPays, Extends, NeverPays}; !slices.Equal(kinds, want) {
		t.Errorf("kinds %v, want %v", kinds, want)
	}
	if want := []int64{12000, 12650, 8200}; !slices.Equal(amounts, want) {
		t.Errorf("amounts %v, want %v", amounts, want)
	}
}

func TestEveryKindOccursInEachDeck(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		for part := range slices.Chunk(Draw("run", seed, 3*deckSize, time.Minute), deckSize) {
			counts := map[Kind]int{}
			for _, c := range part {
				counts[c.Kind]++
			}
			for _, k := range Kinds() {
				if counts[k] == 0 {
					t.Errorf("seed %d: no customer %s", seed, k)
				}
			}
		}
	}
	total := 0
	for _, d := range deck {
		total += d.count
	}
	if total != deckSize {
		t.Errorf("a deck has %d cards, deckSize is %d", total, deckSize)
	}
}

func TestCustomersActAsTheirKindSays(t *testing.T) {
	t.Parallel()
	const timeout = 10 * time.Second
	paysInExtension, staysInExtension := 0, 0
	for _, c := range Draw("run", 3, 2000, timeout) {
		var sum int64
		seen := map[string]bool{}
		for _, it := range c.Items {
			sum += it.Price * it.Quantity
			if seen[it.SKU] || it.Quantity < 1 || it.Price < 1 {
				t.Fatalf("customer %d has items %v", c.Number, c.Items)
			}
			seen[it.SKU] = true
		}
		if sum != c.Amount || len(c.Items) == 0 {
			t.Fatalf("customer %d owes %d for items of %d", c.Number, c.Amount, sum)
		}
		var notices []Notice
		var last time.Duration
		for _, a := range c.Acts {
			notices = append(notices, a.Notices...)
			if !a.ToDeadline {
				if a.After <= 0 || a.After >= timeout*19/20 || a.After < last {
					t.Fatalf("%s acts after %s, the act before was after %s", c.Kind, a.After, last)
				}
				last = a.After
			}
		}
		paid := func(i int) int64 { return notices[i].Amount - c.Amount }
		wrong := false
		switch c.Kind {
		case NeverPays:
			wrong = len(c.Acts) != 0
		case PaysEarly:
			wrong = len(notices) != 1 || paid(0) != 0 || c.Acts[0].ToDeadline
		case PaysLastMoment:
			a := c.Acts[0]
			wrong = len(notices) != 1 || !a.ToDeadline || a.After >= 0 || a.After < -50*time.Millisecond
		case PaysLate:
			a := c.Acts[0]
			wrong = len(notices) != 1 || !a.ToDeadline || a.After <= 0
		case PaysTwice:
			wrong = len(notices) != 2 || paid(0) != 0 || paid(1) != 0 || notices[0].Transaction == notices[1].Transaction
		case PaysTooLittle:
			wrong = len(notices) != 1 || paid(0) >= 0 || notices[0].Amount <= 0
		case PaysTooMuch:
			wrong = len(notices) != 1 || paid(0) <= 0
		case RepeatsNotice:
			wrong = len(notices) != 3 || len(c.Acts) != 1 || notices[0] != notices[1] || notices[1] != notices[2]
		case CancelsByHand:
			wrong = len(c.Acts) != 1 || !c.Acts[0].Cancel
		case Extends:
			wrong = c.Acts[0].Extend <= 0
			if len(notices) == 1 {
				paysInExtension++
				// In the time that was added: after the old deadline, before the new one.
				pay := c.Acts[1]
				wrong = wrong || !pay.ToDeadline || pay.After >= 0 || -pay.After >= c.Acts[0].Extend
			} else {
				staysInExtension++
			}
		}
		if wrong {
			t.Errorf("%s acts like this: %+v", c.Kind, c.Acts)
		}
	}
	if paysInExtension != staysInExtension {
		t.Errorf("%d pay in the extension and %d do not; they should alternate", paysInExtension, staysInExtension)
	}
}

func TestTwoRunsDoNotShareStock(t *testing.T) {
	t.Parallel()
	names := map[string]bool{}
	for _, run := range []string{"a", "b"} {
		for _, sku := range Shelf(run, 100) {
			if names[sku.Name] {
				t.Errorf("%s is on two shelves", sku.Name)
			}
			names[sku.Name] = true
		}
		shelf := Shelf(run, 100)
		for _, c := range Draw(run, 1, 100, time.Minute) {
			for _, it := range c.Items {
				if !slices.ContainsFunc(shelf, func(s SKU) bool { return s.Name == it.SKU }) {
					t.Errorf("%s is ordered and not on the shelf of %s", it.SKU, run)
				}
			}
		}
	}
}

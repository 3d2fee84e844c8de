package orders

import (
	"fmt"
	"strings"
	"time"
)

// Policy says how long the orders of a channel and a payment method may stay unpaid. It holds for orders that name neither a timeout nor a
// deadline themselves. What it said when an order was placed stays with the order, whatever it says later.
type Policy struct {
	// Channel and PaymentMethod are what an order must have, letter by letter. Empty, or "*": anything, also none.
	Channel, PaymentMethod string
	// Never gives the orders no deadline: they are never cancelled by timeout (a bank transfer, cash on delivery).
	Never bool
	// Timeout is the time in which the customer is told to pay. Default: the Store's.
	Timeout time.Duration
	// Grace is what the deadline lies behind that, for methods whose money is slow to be reported: who pays in the last minute is not
	// cancelled while the notice is on its way. Default: none.
	Grace time.Duration
}

// ParsePolicies reads policies from text, one a line or separated by semicolons. Each is a few words NAME=VALUE: channel, method, timeout (a
// duration with its unit, or never) and grace; a name that is left out, or *, stands for anything. Empty lines and what follows a # are
// passed over. The error names the policy and what is wrong with it.
//
//	method=bank_transfer timeout=never
//	channel=kiosk timeout=10m
//	method=wallet timeout=30m grace=5m
func ParsePolicies(text string) ([]Policy, error) {
	var list []Policy
	for line := range strings.SplitSeq(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		for one := range strings.SplitSeq(line, ";") {
			words := strings.Fields(one)
			if len(words) == 0 {
				continue
			}
			p, err := parsePolicy(words)
			if err != nil {
				return nil, fmt.Errorf("policy %q: %w", strings.Join(words, " "), err)
			}
			list = append(list, p)
		}
	}
	return list, checkPolicies(list)
}

func parsePolicy(words []string) (Policy, error) {
	var p Policy
	seen := map[string]bool{}
	for _, word := range words {
		name, value, ok := strings.Cut(word, "=")
		if !ok || value == "" {
			return Policy{}, invalid("%q is not NAME=VALUE (a name with a blank in it cannot be written here)", word)
		}
		if seen[name] {
			return Policy{}, invalid("%s is given twice", name)
		}
		seen[name] = true
		var err error
		switch name {
		case "channel":
			p.Channel = value
		case "method":
			p.PaymentMethod = value
		case "timeout":
			if p.Never = value == "never"; !p.Never {
				p.Timeout, err = parsePositive(name, value)
			}
		case "grace":
			p.Grace, err = parsePositive(name, value)
		default:
			err = invalid("there is no %q; a policy has channel, method, timeout and grace", name)
		}
		if err != nil {
			return Policy{}, err
		}
	}
	if !seen["timeout"] && !seen["grace"] {
		return Policy{}, invalid("it says neither timeout nor grace, so it says nothing")
	}
	return p, nil
}

func parsePositive(name, value string) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 {
		return 0, invalid("%s=%s is not a positive duration with its unit, such as 45m", name, value)
	}
	return d, nil
}

// String writes a policy as [ParsePolicies] reads it.
func (p Policy) String() string {
	var words []string
	for _, w := range []struct{ name, value string }{{"channel", p.Channel}, {"method", p.PaymentMethod}} {
		if !isAny(w.value) {
			words = append(words, w.name+"="+w.value)
		}
	}
	switch {
	case p.Never:
		words = append(words, "timeout=never")
	case p.Timeout != 0:
		words = append(words, "timeout="+p.Timeout.String())
	}
	if p.Grace != 0 {
		words = append(words, "grace="+p.Grace.String())
	}
	return strings.Join(words, " ")
}

func isAny(name string) bool { return name == "" || name == "*" }

// checkPolicies refuses what contradicts itself, and a policy that can never hold since one before it takes all of its orders.
func checkPolicies(list []Policy) error {
	for i, p := range list {
		for what, name := range map[string]string{"channel": p.Channel, "payment method": p.PaymentMethod} {
			if err := checkName(what, name, false); err != nil {
				return fmt.Errorf("policy %q: %w", p, err)
			}
		}
		switch {
		case p.Timeout < 0 || p.Grace < 0:
			return invalid("policy %q: a time is negative", p)
		case p.Timeout%time.Millisecond != 0 || p.Grace%time.Millisecond != 0:
			return invalid("policy %q: times are whole milliseconds", p)
		case p.Never && (p.Timeout != 0 || p.Grace != 0):
			return invalid("policy %q: an order without deadline has neither timeout nor grace", p)
		}
		for _, before := range list[:i] {
			if (isAny(before.Channel) || before.Channel == p.Channel) && (isAny(before.PaymentMethod) || before.PaymentMethod == p.PaymentMethod) {
				return invalid("policy %q never holds: the first that fits does, and %q before it fits all of its orders; put the narrower one first", p, before)
			}
		}
	}
	return nil
}

// policyOf gives the first policy that fits; without one, that of the Store.
func (c Config) policyOf(channel, method string) Policy {
	fits := func(name, is string) bool { return isAny(name) || name == is }
	for _, p := range c.Policies {
		if fits(p.Channel, channel) && fits(p.PaymentMethod, method) {
			if p.Timeout == 0 {
				p.Timeout = c.Timeout
			}
			return p
		}
	}
	return Policy{Timeout: c.Timeout}
}

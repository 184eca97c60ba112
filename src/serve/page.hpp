// The files of the status page, built in from src/serve/page.
#pragma once

#include <string_view>

namespace statepack::serve {

extern const std::string_view kPageHtml;
extern const std::string_view kPageCss;
extern const std::string_view kPageJs;

}  // namespace statepack::serve
